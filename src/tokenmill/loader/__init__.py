"""Batches for a trainer: loader, mixtures, packing, page cache. Needs only numpy and msgspec."""
