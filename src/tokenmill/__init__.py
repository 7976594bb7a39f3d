"""tokenmill: raw text to training-ready token datasets.

tokenmill.prepare("corpus/*.parquet", "data/owt", tokenizer="gpt2")
tokenmill.verify("data/owt")
dataset = tokenmill.open("data/owt")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.build.api import prepare
    from tokenmill.build.preview import plan
    from tokenmill.dataset.dataset import Dataset
    from tokenmill.errors import TokenmillError
    from tokenmill.executors.hosts import cluster
    from tokenmill.formats.convert import export, import_
    from tokenmill.formats.open import open
    from tokenmill.loader.loader import DataLoader
    from tokenmill.loader.mixture import Mixture
    from tokenmill.maintenance.push_pull import pull, push
    from tokenmill.maintenance.repair import repair
    from tokenmill.maintenance.verify import verify
    from tokenmill.text_stream import stream


__version__ = "0.1.0"

__all__ = [
    "DataLoader",
    "Dataset",
    "Mixture",
    "TokenmillError",
    "cluster",
    "export",
    "import_",
    "open",
    "plan",
    "prepare",
    "pull",
    "push",
    "repair",
    "stream",
    "verify",
]


# Nothing heavy loads before it is used; `import tokenmill` stays cheap on a trainer node.
_HOMES = {
    "DataLoader": "tokenmill.loader.loader",
    "Dataset": "tokenmill.dataset.dataset",
    "Mixture": "tokenmill.loader.mixture",
    "TokenmillError": "tokenmill.errors",
    "cluster": "tokenmill.executors.hosts",
    "export": "tokenmill.formats.convert",
    "import_": "tokenmill.formats.convert",
    "open": "tokenmill.formats.open",
    "plan": "tokenmill.build.preview",
    "prepare": "tokenmill.build.api",
    "pull": "tokenmill.maintenance.push_pull",
    "push": "tokenmill.maintenance.push_pull",
    "repair": "tokenmill.maintenance.repair",
    "stream": "tokenmill.text_stream",
    "verify": "tokenmill.maintenance.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
