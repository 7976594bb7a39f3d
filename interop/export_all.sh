#!/bin/sh
# Exports for interop/layouts.py: a dataset of 16-bit tokens and one of 32-bit ones, in every layout that it reads.
#
# interop/export_all.sh CORPUS WORK     CORPUS is parquet with a column text, or a folder of text files
set -eu
corpus=$1 work=$2
tokenmill=.venv/bin/tokenmill

"$tokenmill" prepare "$corpus" -o "$work/narrow" --split val=0.05 --documents files -q
.venv/bin/python interop/wide_tokens.py "$work/narrow" "$work/wide"
for kind in narrow wide; do
    for layout in megatron llmc olmo datatrove; do
        case $layout in llmc) size="--shard-size 100K" ;; *) size= ;; esac
        # shellcheck disable=SC2086 - two words, or none
        "$tokenmill" export "$work/$kind" --to "$layout" "$work/$kind-exports/$layout" $size -q
    done
done
