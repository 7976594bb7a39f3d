"""Does `tokenmill import` make the same dataset of what the peers' own writers wrote?

python interop/imported.py DATASET EXPORTS
"""

# ruff: noqa: T201 - a script prints

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from reference import stop

import tokenmill
from tokenmill.layouts.content import content_fingerprint


def main(dataset: str, exports: Path) -> None:
    source = tokenmill.open(dataset)
    expected, eot = content_fingerprint(source), source.manifest.tokenizer["eot_id"]
    for folder in sorted(exports.glob("*-made")):
        layout = folder.name.removesuffix("-made")
        with tempfile.TemporaryDirectory() as work:
            found = tokenmill.import_(folder, f"{work}/dataset", layout=layout, eot_id=eot).manifest
        if found.fingerprint != expected:
            stop(f"{layout}: the import has fingerprint {found.fingerprint}, not {expected}")
        print(f"import of what {layout} wrote: {found.documents:,} documents, the same fingerprint")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
