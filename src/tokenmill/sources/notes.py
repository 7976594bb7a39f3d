"""What is told of sources before the work: what was passed over, guessed, or cannot be read."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tokenmill.errors import SourceError
from tokenmill.planning import Source
from tokenmill.sources.columns import Rule
from tokenmill.sources.kinds import count_endings, ending_of, kind_of
from tokenmill.storage.hub import is_hub

if TYPE_CHECKING:
    from tokenmill.recipe import Recipe

_SPLITS_FILE = "dataset_dict.json"
_MOST = 10


def notes(
    recipe: Recipe, root: str, sources: Iterable[Source], passed_over: Counter[str], unread: Sequence[SourceError]
) -> Iterator[str]:
    """One sentence each. `passed_over` are endings of files in folders, `unread` what is wrong with sources."""
    for argument in (*recipe.sources, *recipe.val_sources):
        if is_hub(root):
            yield f"{argument} is taken from the hub: {root}"
        elif os.path.isfile(os.path.join(argument, _SPLITS_FILE)):
            yield f"{argument} holds several splits, and all of them are taken: name the folders inside to choose"
    if passed_over:
        yield f"{_files(passed_over.total())} of other kinds in the folders passed over: {count_endings(passed_over)}"
    unknown: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    for source in sources:
        if kind_of(source.name)[0] is None and recipe.documents == "lines":
            unknown[ending_of(source.name)] += 1
        if recipe.text_column is None and recipe.template is None:
            rules[json.dumps(source.text)] += 1
    if unknown:
        yield f"{_files(unknown.total())} of unknown kind read as text, a document a line: {count_endings(unknown)}"
    for rule, count in rules.most_common():
        yield from (f"the text of {_files(count)} is {what}" for what in _guessed(json.loads(rule)))
    yield from (error.message for error in unread[:_MOST])
    if len(unread) > _MOST:
        yield f"and {len(unread) - _MOST} more that cannot be read"


def _guessed(rule: Rule) -> Iterator[str]:
    """How the text is found, where that is not plain."""
    if "join" in rule:
        parts = (f"{name[:-1]} (if it is there)" if name.endswith("?") else name for name in rule["join"])
        yield f"{' and '.join(parts)}, with a blank line between"
    elif "turns" in rule:
        yield f"what is said in {rule['turns']}, with a blank line between the turns; who says it is left out"


def _files(count: int) -> str:
    return f"{count:,} file" if count == 1 else f"{count:,} files"
