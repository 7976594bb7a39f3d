"""catid's files: the bytes of its own writer, its hashes, CityHash64."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from made import EOT, documents_of, imported, make_dataset, put

import tokenmill
from tokenmill.errors import DatasetError
from tokenmill.formats.catid import cityhash64, hash_one

# What catid's own writer made of 70001, 70002, 70003 and 70005 to 70008.
CATID = {
    "data_0.bin": "KLUv/SAMYQAAcXJzERERAQEBAAAAKLUv/SAQgQAAdXZ3eBEREREBAQEBAAAAAA4E/3FfG+dEsYs=",
    "index_0.bin": "AAAAAAMAAAAVAAAABAAAAC4AAAAOBLSJdTEonMrF",
}


CATID_INDEX = (
    b"version: 14\ntoken_bytes: 4\ntotal_tokens: 7\ndata_files:\n  - data_0.bin\nindex_files:\n  - index_0.bin\n"
)


# Of the first 0, 1, 3, 4, 7, ... bytes below, by the published implementation.
CITY = [
    "9ae16a3b2f90404f",
    "be6056edf5e94b54",
    "2c15359798678555",
    "e0ce51a94e0157d1",
    "42dddf8b335f2364",
    "380e4eb152ab0b6d",
    "bc310e5874cb6fd7",
    "202decd1ed205390",
    "e03f15f8fe079e34",
    "ca33e129bb5a02b0",
    "b33d4e1d2d302597",
    "9bb82903f9cdc5ad",
    "5e7f86d433570967",
    "a141d951ab614244",
    "7760b7cf04b3c9a1",
    "b207f761718329c2",
]


def test_what_catids_writer_made_is_imported(tmp_path: Path) -> None:
    files = {name: base64.b64decode(text) for name, text in CATID.items()}
    path = put(tmp_path / "catid", {**files, "index.yaml": CATID_INDEX})
    ids = [[70001, 70002, 70003], [70005, 70006, 70007, 70008]]
    assert documents_of(imported(path, "catid", eot_id=EOT)) == {"train": ids}
    plain = tokenmill.import_(path, tmp_path / "plain", layout="catid")
    assert [document.tolist() for document in tokenmill.open(tmp_path / "plain")["train"]] == ids
    assert plain.manifest.identity["eot"] == "none"


def test_catids_index_and_hashes_are_those_of_its_writer(tmp_path: Path) -> None:
    dataset = make_dataset(
        tmp_path, {"train": [[70001, 70002, 70003], [], [70005, 70006, 70007, 70008]]}, dtype="uint32"
    )
    done = tokenmill.export(dataset, tmp_path / "out", to="catid")
    assert done.notes[0] == "1 documents of train have only the end of text, and are left out"
    for name, text in CATID.items():
        assert (tmp_path / "out" / "train" / name).read_bytes() == base64.b64decode(text)


@pytest.mark.parametrize("name", ["data_0.bin", "index_0.bin"])
@pytest.mark.parametrize("place", [0, 5, -12, -1])
def test_damage_of_catids_files_is_found_by_their_hashes(tmp_path: Path, name: str, place: int) -> None:
    files = {one: bytearray(base64.b64decode(text)) for one, text in CATID.items()}
    files[name][place] ^= 64
    path = put(tmp_path / "catid", {**{one: bytes(data) for one, data in files.items()}, "index.yaml": CATID_INDEX})
    with pytest.raises(DatasetError, match=name):
        imported(path, "catid")


def test_cityhash_is_the_published_one() -> None:
    data = (np.arange(5000, dtype=np.uint64) * 2654435761 >> 16).astype(np.uint8)
    sizes = np.array([0, 1, 3, 4, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 4999])
    assert [f"{one:016x}" for one in cityhash64(data, np.zeros(16, np.int64), sizes).tolist()] == CITY
    assert [hash_one(data[:size].tobytes()) for size in sizes] == [int(one, 16) for one in CITY]
