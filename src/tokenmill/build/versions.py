"""The same tokenmill and the same engine on every node of a cluster, or no build."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from tokenmill.errors import RecipeError
from tokenmill.tokenizer.spec import TokenizerSpec


def own_version() -> str:
    return importlib.metadata.version("tokenmill")


def check_versions(version: str, tokenizer: dict[str, Any], spec: TokenizerSpec) -> None:
    """Refuse a driver with another tokenmill than this node's, or with another engine than `spec` has here."""
    ours, theirs = (version, tokenizer["engine"]), (own_version(), spec.describe()["engine"])
    if ours != theirs:
        raise RecipeError(
            f"{platform.node()} has tokenmill {theirs[0]} with {theirs[1]}, the driver {ours[0]} with {ours[1]}",
            hint="install the same versions on every node",
        )
