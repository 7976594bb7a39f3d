#!/bin/sh
# The common commands on data that every machine has: Python's own standard library, one document per file.
set -eu
library=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
out=demo-data/stdlib

echo "== plan"
tokenmill plan "$library/*.py" "$library/*/*.py" --documents files --split val=0.01 -o "$out"

echo "== prepare (run it again after an interruption to resume)"
code=0
tokenmill prepare "$library/*.py" "$library/*/*.py" --documents files --split val=0.01 -o "$out" || code=$?
# 3 means done: a few files of the library are not UTF-8, on purpose, and are quarantined.
[ "$code" -eq 0 ] || [ "$code" -eq 3 ] || exit "$code"

echo "== verify"
tokenmill verify "$out"

echo "== inspect"
tokenmill inspect "$out" --documents 2
