"""Verify, repair, push and pull finished datasets."""
