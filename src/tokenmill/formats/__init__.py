"""Layouts: ways to lay tokens out on disk for some trainer, and back.

    dataset -> plan of a layout: parts and notes -> transfer: parts, receipts, record -> files of the layout
    files of a layout -> opened as splits -> transfer: shards, receipts, manifest -> dataset

shape      what a layout module has: options in, parts out
registry   the layouts by name
stream     the tokens of a split in the order, with the end of text, that a layout wants
transfer   parts written in parallel, durable and resumable
exporting  dataset -> files of a layout        importing  files of a layout -> dataset
rows       documents or packed rows, for layouts that store samples; stored reads such files, foreign finds them
content    the fingerprint of documents and tokens, whatever layout they are in
"""
