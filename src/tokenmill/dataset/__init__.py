"""Reading datasets. Needs numpy and the standard library only: a trainer node loads nothing else.

Shards: the byte layout, the writer and the reader of a .bin and .idx pair.
"""
