"""The crash lab: it breaks builds in every way that a machine can, and counts what comes out wrong.

world      small builds whose right result is known
report     one row for each kind of fault, and the table of all

Each experiment is a function that gives a `Row`. The tests run it small; `run.py` runs it large.
"""
