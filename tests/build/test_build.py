from __future__ import annotations

import errno
from pathlib import Path

from conftest import tree
from tokenmill.build.build import build
from tokenmill.recipe import make_recipe
from tokenmill.storage import Folder
from tokenmill.storage.fs import LocalFileSystem


def test_a_scratch_disk_without_room_for_a_folder_is_done_without(corpus: Path, tmp_path: Path) -> None:
    class Full(LocalFileSystem):
        def mkdir(self, path: str) -> None:
            if path.startswith(str(tmp_path / "fast")):
                raise OSError(errno.ENOSPC, "no space left on device")
            super().mkdir(path)

    recipe = make_recipe({"sources": (str(corpus),), "tokenizer": "byte"}, config=None)
    for name, fs, scratch in (("out", Full(), str(tmp_path / "fast")), ("right", LocalFileSystem(), None)):
        folder = Folder(str(tmp_path / name), fs)
        build(recipe, folder, workers=1, crew=None, scratch=scratch, restart=False, watch=None)
    assert tree(tmp_path / "out") == tree(tmp_path / "right")
