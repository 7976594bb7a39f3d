"""Who runs units: this process, a pool of processes, a Ray cluster."""
