"""What says where things are in a parquet or an Arrow file is read by native code: no byte of it may end us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

TEXTS = [f"{i} some text, no two alike" for i in range(12)]
# Lists the file once for each changed byte, and says how often it could and could not be.
LIST_ALL = """
import sys
from pathlib import Path
from tokenmill.errors import TokenmillError
from tokenmill.recipe import make_recipe
from tokenmill.sources.discover import list_sources

path = Path(sys.argv[1])
good = path.read_bytes()
recipe = make_recipe({"sources": (str(path),)})
listed = refused = 0
for place in range(int(sys.argv[2]), min(int(sys.argv[3]), len(good))):
    for other in (good[place] ^ 1, (good[place] + 16) % 256):
        path.write_bytes(good[:place] + bytes([other]) + good[place + 1:])
        try:
            list_sources(recipe)
            listed += 1
        except TokenmillError:
            refused += 1
print(listed, refused)
"""


def list_all(path: Path, start: int, stop: int) -> tuple[int, int]:
    command = [sys.executable, "-c", LIST_ALL, str(path), str(start), str(stop)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    listed, refused = map(int, done.stdout.split())
    return listed, refused


def test_no_byte_of_a_parquet_footer_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, use_dictionary=False)
    size = path.stat().st_size
    listed, refused = list_all(path, size - pq.read_metadata(path).serialized_size - 8, size)
    assert listed > 0
    assert refused > 0


def test_no_byte_of_an_arrow_header_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    listed, refused = list_all(path, 0, 600)
    assert listed > 0
    assert refused > 0
