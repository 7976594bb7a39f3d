"""prepare --layout: the files of a layout beside the dataset, in a folder of the layout's name inside it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from tokenmill.errors import RecipeError, TokenmillError, from_record, to_record
from tokenmill.layouts.exporting import Exported, export
from tokenmill.layouts.registry import check_needs, check_num_files, layout_bytes, parse_layout
from tokenmill.layouts.shape import Options
from tokenmill.layouts.transfer import Watcher
from tokenmill.recipe import Recipe
from tokenmill.shards.layout import dtype_for
from tokenmill.storage import Folder
from tokenmill.storage.space import require_space, same_disk
from tokenmill.tokenizer.spec import resolve


def check_layout(text: str, recipe: Recipe) -> None:
    """Refuse now what the export would refuse after the build."""
    name, _ = parse_layout(text)
    if name in recipe.splits:
        raise RecipeError(
            f"the layout {name} would be written to a folder of that name, which is the split's",
            hint=f"give the split another name, or export afterwards: tokenmill export OUT --to {name} DIR",
        )
    spec = resolve(recipe.tokenizer, eot_token=recipe.eot_token)
    check_needs(
        name, dtype=dtype_for(spec.vocab_size), vocab_size=spec.vocab_size, eot=recipe.eot, where="what is asked for"
    )


def bytes_beside(folder: Folder, text: str, dtype: str, num_tokens: int) -> int:
    """How many bytes an export of so many tokens will still write beside the dataset, on the same disk.

    What it would refuse because of their number it refuses now.
    """
    name, options = parse_layout(text)
    check_num_files(name, options, [num_tokens])
    place = Folder(folder.at(name), folder.fs)
    if not same_disk(place, folder):
        require_space(place, layout_bytes(name, dtype, num_tokens) - _bytes_in(place))
        return 0
    return max(0, layout_bytes(name, dtype, num_tokens) - _bytes_in(place))


def _bytes_in(place: Folder) -> int:
    parents = [name for name in place.names() if name != ".build" and place.size_of(name) is None]
    return sum(sum(place.sizes(parent).values()) for parent in ("", *parents))


def export_beside(
    output: str,
    text: str,
    *,
    workers: int,
    scratch: str | os.PathLike[str] | None,
    restart: bool,
    watch: Watcher | None,
) -> Exported:
    """Export the dataset at `output`, into it."""
    name, options = parse_layout(text)
    place = os.path.join(output, name)
    try:
        return export(
            output,
            place,
            to=name,
            workers=workers,
            scratch=scratch,
            restart=restart,
            watch=watch,
            **options.given(),
        )
    except TokenmillError as error:
        line = ["tokenmill", "export", output, place, "--to", name, *_as_flags(options)]
        done = f"the dataset at {output} is finished and complete, but its export to {name} is not"
        told = {
            "message": f"{done}: {error.message}",
            "hint": f"{error.hint}; to resume the export alone: {shlex.join(line)}",
        }
        raise from_record({**to_record(error), **told}) from None


def _as_flags(options: Options) -> Iterator[str]:
    for name, value in options.given().items():
        if value is not False:
            yield f"--{name.replace('_', '-')}"
            yield from () if value is True else (str(value),)
