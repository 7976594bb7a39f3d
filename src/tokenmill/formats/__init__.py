"""Other trainers' files: detected, read and written."""
