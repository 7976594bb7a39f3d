"""The work of one unit, as every worker runs it."""
