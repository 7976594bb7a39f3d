"""The build: one unit's work, the pool that shares units out, the commit that joins them.

setup    recipe -> sources, tokenizer, plan        survey    a look before the work
unit     one unit -> pieces + receipt              pool      many units, some at a time
budget   an exact number of tokens                 commit    receipts -> shards -> manifest
state    what an output folder holds               build     all of it in order
crew     worker processes                           prepare   hires, then builds
"""
