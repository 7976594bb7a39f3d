"""Reading datasets. Needs numpy and the standard library only: a trainer node loads nothing else."""
