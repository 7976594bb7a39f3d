"""tokenmill: raw text to training-ready token datasets.

tokenmill.prepare("corpus/*.parquet", "data/owt", tokenizer="gpt2")
tokenmill.verify("data/owt")
dataset = tokenmill.open("data/owt")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from tokenmill.build.prepare import prepare
    from tokenmill.build.preview import plan
    from tokenmill.data.dataset import Dataset, open
    from tokenmill.data.loader import DataLoader
    from tokenmill.data.mixture import Mixture
    from tokenmill.errors import TokenmillError
    from tokenmill.hosts import cluster
    from tokenmill.layouts.exporting import export
    from tokenmill.layouts.importing import import_
    from tokenmill.moving import pull, push
    from tokenmill.repairing import repair
    from tokenmill.streaming import stream
    from tokenmill.verifying import verify

# Nothing heavy loads before it is used; `import tokenmill` stays cheap on a trainer node.
_HOMES = {
    "DataLoader": "tokenmill.data.loader",
    "Dataset": "tokenmill.data.dataset",
    "Mixture": "tokenmill.data.mixture",
    "TokenmillError": "tokenmill.errors",
    "cluster": "tokenmill.hosts",
    "export": "tokenmill.layouts.exporting",
    "import_": "tokenmill.layouts.importing",
    "open": "tokenmill.data.dataset",
    "plan": "tokenmill.build.preview",
    "prepare": "tokenmill.build.prepare",
    "pull": "tokenmill.moving",
    "push": "tokenmill.moving",
    "repair": "tokenmill.repairing",
    "stream": "tokenmill.streaming",
    "verify": "tokenmill.verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
