#!/bin/sh
# Real peers read what tokenmill writes, and write what it reads: interop/run.sh [CORPUS]
#
# CORPUS is parquet with a column text; without one, it is Python's own standard library. Each peer has an
# environment of its own, for their pins are not ours. Whatever differs, the others are tried as well; the table in
# the end has all of them.
set -u
cd "$(dirname "$0")/.."
corpus=${1:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export INTEROP_RESULTS="$work/results"
: > "$INTEROP_RESULTS"

# environment FOLDER PIP-ARGUMENTS...
environment() {
    venv=$1
    shift
    [ "$(cat "$venv/.done" 2>/dev/null)" = "$*" ] && return
    ${PYTHON:-python3} -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" &&
        echo "$*" > "$venv/.done"
}
# step COMMAND...: what fails is told in the table
step() {
    "$@" && return
    .venv/bin/python interop/results.py "$INTEROP_RESULTS" "${2##*/} ${3:-}" "the step failed, see above"
    failed=1
}
missing() {
    .venv/bin/python interop/results.py "$INTEROP_RESULTS" "$1" "it does not install here"
}
failed=0
ours=.venv/bin/python

step $ours interop/tiktoken_ids.py ${corpus:+"$corpus"} --work "$work"
corpus=${corpus:-$work/library}

# Megatron-core declares a GPU stack that its data code does without, so it is installed bare, beside what that imports.
trainers=.venv-interop
if environment $trainers torch==2.13.0 numpy packaging tiktoken pyarrow datatrove==0.10.1 ai2-olmo-core==3.0.0 tokenizers &&
    "$trainers/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1; then
    step $trainers/bin/python -W ignore interop/megatron_shards.py "$work/dataset" "$corpus"
    step $ours interop/ours.py write "$work" "$corpus"
    step $trainers/bin/python -W ignore interop/megatron_blend.py "$work/dataset" "$work/narrow"
    for kind in narrow wide; do
        step $trainers/bin/python -W ignore interop/layouts.py "$work/$kind" "$work/$kind-exports"
        step $ours interop/ours.py read "$work/$kind" "$work/$kind-exports"
    done
else
    missing "megatron-core, datatrove, ai2-olmo-core"
fi

# litData's optimize() empties the folders that it takes for its caches, so it is given some to empty.
rows=$work/rows
mkdir "$rows" "$rows/home" "$rows/tmp"
peer() {
    HOME="$rows/home" TMPDIR="$rows/tmp" LITDATA_CACHE_DIR="$rows/tmp/cache" \
        DATA_OPTIMIZER_CACHE_FOLDER="$rows/tmp/chunks" DATA_OPTIMIZER_DATA_CACHE_FOLDER="$rows/tmp/data" \
        step "$1/bin/python" -W ignore interop/rows_peers.py "$2" "$rows"
}
step $ours interop/rows_ours.py write "$rows" "$corpus"
if environment .venv-peers --group peers; then
    peer .venv-peers mds
    peer .venv-peers litdata
else
    missing "mosaicml-streaming, litdata"
fi
if environment .venv-datasets datasets==5.2.0 tiktoken; then
    peer .venv-datasets huggingface
    step $ours interop/nanogpt_split.py write "$work/nanogpt" "$corpus"
    HOME="$rows/home" .venv-datasets/bin/python -W ignore benchmarks/nanogpt_recipe.py \
        src/tokenmill/embedded/gpt2.tiktoken "$work/nanogpt/theirs" "$work/nanogpt/texts.parquet" > "$work/recipe" 2>&1 ||
        cat "$work/recipe"
    step $ours interop/nanogpt_split.py compare "$work/nanogpt"
else
    missing datasets
fi
# catid's loader is built from its source, with a compiler and cmake.
if environment .venv-catid catid_dataloader==0.2.0; then
    peer .venv-catid catid
else
    missing catid_dataloader
fi
step $ours interop/rows_ours.py read "$rows"

$ours interop/results.py "$INTEROP_RESULTS" && exit $failed
