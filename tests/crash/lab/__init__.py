"""The crash lab: it breaks builds in every way that a machine can, and counts what comes out wrong.

world      small builds whose right result is known
report     one row for each kind of fault, and the table of all

In memory:
modelfs    a file system that writes down all it does      aftermath  what a crash may leave of it
subject    a build, a repair, a joining, to be crashed     steady     thousands of them in one process
verdict    whether a crashed state is good                 powercut   kills and power cuts, up to three in a row
decay      damage behind a crash                           trouble    what goes wrong without one
bugs       protective lines, taken out                     seeded     does the lab notice?

With real processes and files:
kills      SIGKILL at every operation                      faults     errors from every operation
native     errors of the kernel, by strace                 disks      disks that are full
races      eight at once, stopped ones, stale locks        damage     what verify and repair must notice and mend
fuzz       records, recipes and tokenizers, changed        hostile    datasets that a stranger wrote
guided     records again, led by the code they reach       inputs     sources, changed
bombs      small on the disk, huge in memory               specials   special strings in texts
leaks      secrets, searched for everywhere                network    object stores behind a proxy that fails
transfers  exports and imports, killed

Each experiment is a function that gives a `Row`. The tests run it small; `run.py` runs it large.
"""
