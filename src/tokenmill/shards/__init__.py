"""Shards: the byte layout, the writer and the reader of a .bin and .idx pair."""
