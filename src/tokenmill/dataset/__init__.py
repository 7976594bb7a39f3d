"""Finished datasets: manifest, .bin/.idx shards, and reading them with numpy."""
