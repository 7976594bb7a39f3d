"""The build: one unit's work, the executors that share units out, the commit that joins them.

prepare   hires a crew, then builds         build      all of it in order
setup     recipe -> sources, tokenizer, plan
check     a look before the work            epoch      units -> tokens in memory, for a stream
documents text -> kept documents' tokens    unit       one unit -> pieces + receipt
executor  what runs units: inline, pool, ray
crew      worker processes                  foreman    forks them, with everything loaded
budget    an exact number of tokens         commit     receipts -> shards -> manifest
state     what an output folder holds       redo       units done again, for repair
"""
