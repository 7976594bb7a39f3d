"""What a finished dataset is, and how it is read."""
