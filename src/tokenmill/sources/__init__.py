"""Sources: from files to batches of documents.

listing   files, folders, globs, URLs -> a table of pinned sources
places    opening and pinning, on this machine and in object stores
streams   bytes, plain or compressed        separated   byte ranges -> whole documents
jsonl, text, parquet, arrow                 one module a kind, all giving batches
columns   text from fields                  batch       what they all give
not_text  what a file is, by its first bytes, that is not text
"""
