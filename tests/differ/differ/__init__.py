"""The lab of differences: what the package computes against an independent computation of the same.

tokenizers   every tokenizer path against its reference: hard text, real multilingual text, trained models
derived      packing plans, exports, imports, states and caches after their dataset's content changed
arguments    types and extremes of every public argument
hostile      datasets of a stranger (links, names, permissions, records) against every command
interrupts   commands that are told to stop, at any moment
bounds       descriptors, memory and time on extreme but legitimate input
bugs         mends taken out one by one: each time an experiment must notice
"""
