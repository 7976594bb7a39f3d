"""Batches for a trainer: loader, mixtures, packing, states. Needs only numpy and msgspec."""
