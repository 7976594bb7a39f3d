"""Tokenizers: from text to token ids."""
