"""A finished dataset: its manifest, its .bin/.idx shards, and how they are read with numpy alone."""
