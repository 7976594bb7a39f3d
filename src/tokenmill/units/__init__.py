"""One unit's work: what every worker runs."""
