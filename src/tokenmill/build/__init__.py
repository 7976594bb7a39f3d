"""The build: one unit's work, the executors that share units out, the commit that joins them.

prepare   hires a crew, then builds         build      all of it in order
setup     recipe -> sources, tokenizer, plan
check     before the work: visits, where; look and drawing, what lies there; estimate, what it tells of the whole
documents text -> kept documents' tokens    unit       one unit -> pieces + receipt
receipt   what a unit says when it is done  trust      whether it is believed
packs     many receipts in a file           epoch      units -> tokens in memory, for a stream
executor  what runs units: inline, pool, ray; ray_nodes: whole parts on nodes, each built by part
crew      worker processes                  foreman    forks them, with everything loaded
budget    an exact number of tokens         commit     receipts -> shards -> manifest
groups    which pieces make a shard         early      shards of a store, copied beside the work
state     what an output folder holds       redo       units done again, for repair
quick     receipts read quickly             ahead      files of the hub, fetched before their units
export    files of a layout beside it       versions   do two machines run the same
"""
