"""Batches for a trainer, with numpy and msgspec alone: loader, batches, packing, mixture, page cache."""
