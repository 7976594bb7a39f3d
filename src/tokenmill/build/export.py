"""prepare --layout: the files of a layout beside the dataset, in a folder of the layout's name inside it."""

from __future__ import annotations

import os

from tokenmill.errors import RecipeError
from tokenmill.layouts.exporting import Exported, export
from tokenmill.layouts.registry import check_needs, parse_layout
from tokenmill.layouts.transfer import Watcher
from tokenmill.recipe import Recipe
from tokenmill.shards.layout import dtype_for
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
    return export(
        output,
        os.path.join(output, name),
        to=name,
        workers=workers,
        scratch=scratch,
        restart=restart,
        watch=watch,
        **options.given(),
    )
