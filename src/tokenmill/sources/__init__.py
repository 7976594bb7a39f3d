"""From files to batches of documents."""
