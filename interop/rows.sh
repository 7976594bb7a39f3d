#!/bin/sh
# The peers whose layouts store rows, each in an environment of its own: interop/rows.sh CORPUS WORK
#
# catid's loader is built from its source, with a compiler and cmake. litData's optimize() empties the
# folders that it takes for its caches, so it is given some to empty.
set -eu
corpus=$1
work=$2/rows
mkdir "$work"

environment() {
    venv=$1
    shift
    if [ ! -e "$venv/.done" ]; then
        ${PYTHON:-python3} -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
        touch "$venv/.done"
    fi
}
environment .venv-peers --group peers
environment .venv-datasets datasets==5.2.0
environment .venv-catid catid_dataloader==0.2.0

mkdir "$work/home" "$work/tmp"
peer() {
    HOME="$work/home" TMPDIR="$work/tmp" LITDATA_CACHE_DIR="$work/tmp/cache" \
        DATA_OPTIMIZER_CACHE_FOLDER="$work/tmp/chunks" DATA_OPTIMIZER_DATA_CACHE_FOLDER="$work/tmp/data" \
        "$1/bin/python" -W ignore interop/rows_peers.py "$2" "$work"
}
.venv/bin/python interop/rows_ours.py write "$work" "$corpus"
peer .venv-peers mds
peer .venv-peers litdata
peer .venv-datasets huggingface
peer .venv-catid catid
.venv/bin/python interop/rows_ours.py read "$work"
