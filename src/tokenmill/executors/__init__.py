"""Executors run units: in this process, in a pool of processes, on a Ray cluster."""
