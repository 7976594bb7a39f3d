"""Sources: from files to batches of documents.

listing   files, folders, globs -> a table of pinned sources
streams   bytes, plain or compressed        separated   byte ranges -> whole documents
jsonl, text, parquet, arrow                 one module a kind, all giving batches
columns   text from fields                  batch       what they all give
"""
