#!/bin/sh
# Real peers read what tokenmill writes: interop/run.sh [CORPUS]
#
# CORPUS is parquet with a column text; without one, it is Python's own standard library.
# The peers get an environment of their own, for their pins are not ours. Megatron-core declares a GPU stack
# that its data code does without, so it is installed bare, with what that code imports.
set -eu
cd "$(dirname "$0")/.."
corpus=${1:-}
venv=.venv-interop

if [ ! -e "$venv/.ready" ]; then
    ${PYTHON:-python3} -m venv "$venv"
    pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
    $pip torch==2.13.0
    $pip --no-deps megatron-core==0.16.1
    $pip numpy packaging tiktoken pyarrow
    touch "$venv/.ready"
fi
if [ ! -e "$venv/.layouts" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check datatrove==0.10.1 ai2-olmo-core==3.0.0 tokenizers
    touch "$venv/.layouts"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python interop/tiktoken_ids.py ${corpus:+"$corpus"} --work "$work"
"$venv/bin/python" -W ignore interop/megatron_shards.py "$work/dataset" "${corpus:-$work/library}"
sh interop/export_all.sh "${corpus:-$work/library}" "$work"
for kind in narrow wide; do
    "$venv/bin/python" -W ignore interop/layouts.py "$work/$kind" "$work/$kind-exports"
    .venv/bin/python interop/imported.py "$work/$kind" "$work/$kind-exports"
done
sh interop/rows.sh "${corpus:-$work/library}" "$work"
