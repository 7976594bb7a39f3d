"""Other trainers' files: opened in place, exported, imported.

    dataset -> Format.write -> parts -> resumable conversion -> files of the format
    files of the format -> Format.read -> splits -> parts -> resumable conversion -> dataset

base        the protocol of a format module, and what the modules share
open        a dataset, local or remote, or files of a format, opened in place
convert     export and import
resumable   parts written in parallel, durable and resumable
rows        what the formats share that store samples
nanogpt megatron llmc templar datatrove olmo huggingface mds litdata catid: one module for each format
"""
