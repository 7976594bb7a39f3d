"""Batches for a trainer, with numpy and msgspec alone."""
