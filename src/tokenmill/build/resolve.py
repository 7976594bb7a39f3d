"""Resolves a recipe to pinned sources, a tokenizer and a plan.

    recipe -> sources, pinned -> units
           -> tokenizer, with its fingerprint

The split `nanogpt` holds out the documents that nanoGPT's own script would: a random choice among the numbers of all
documents. Parquet and Arrow files store how many rows they have; other sources are read once to count them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from tokenmill.build.plan import MANY_FILES, Plan, make_plan
from tokenmill.dataset.bin_idx import dtype_for
from tokenmill.errors import RecipeError, SourceError, TokenizerError
from tokenmill.formats.nanogpt import num_validation, original_permutation
from tokenmill.recipe import BY_ROW, Recipe
from tokenmill.resources import max_batch_documents
from tokenmill.sizes import counted
from tokenmill.sources.base import Source, Unit, naming_what_needs_memory
from tokenmill.sources.discover import Listing, list_sources
from tokenmill.sources.reader import format_of, read_unit, sections
from tokenmill.tokenizers.spec import TokenizerSpec, char_spec, resolve
from tokenmill.units.task import BuildConfig


@dataclass(frozen=True, slots=True)
class ResolvedBuild:
    """A recipe with all its names resolved. `notes` are sentences for the user.

    `formerly` gives the build with the units of version 0.1, if they differ: a build that 0.1 began has that plan.
    """

    recipe: Recipe
    listing: Listing
    spec: TokenizerSpec
    plan: Plan
    notes: tuple[str, ...]
    formerly: Callable[[], ResolvedBuild] | None = None

    @property
    def dtype(self) -> str:
        return dtype_for(self.spec.vocab_size)


def resolve_build(recipe: Recipe, *, output: str | None = None) -> ResolvedBuild:
    """Find the sources and the tokenizer, and make the plan. Writes nothing."""
    spec, note = resolve(recipe.tokenizer, eot_token=recipe.eot_token), ""
    if not spec.needs_texts and spec.file_name:
        # Only a trial shows which engine can encode it.
        from tokenmill.tokenizers.parity import choose_engine

        spec, _, note = choose_engine(spec)
    if recipe.eot != "none" and spec.eot_id is None:
        raise TokenizerError(
            f"{spec.name} names no end-of-text token", hint="name one with `eot_token`, or use `eot='none'`"
        )
    listing = list_sources(recipe, output=output)
    _check_used(recipe, {source.kind for source in listing.sources})
    cut = partial(
        make_plan,
        identity={},
        sources=listing.sources,
        extents=listing.extents,
        unit_bytes=recipe.unit_bytes,
        sample=recipe.unit_sample,
        seed=recipe.seed,
    )
    plan = cut()
    before = cut(count_files=False) if len(listing.sources) >= MANY_FILES else plan
    total = sum(extent.text_bytes for extent in listing.extents)
    # Where sources may be cut is no longer needed, and may take much memory.
    listing = replace(listing, extents=())
    resolve_as = partial(_resolve_as, recipe, listing, spec, total, [note] if note else [])
    return replace(resolve_as(plan), formerly=None if before.units == plan.units else partial(resolve_as, before))


def _resolve_as(
    recipe: Recipe, listing: Listing, spec: TokenizerSpec, total: int, notes: Sequence[str], plan: Plan
) -> ResolvedBuild:
    """The resolved build of a plan without an identity. `total` is the bytes of text of all sources."""
    if spec.needs_texts:
        spec = char_spec(_characters(plan, listing.root, recipe))
    identity = {**recipe.identity(), "tokenizer": spec.fingerprint, "engine": spec.engine_version}
    notes = [*notes, *listing.notes]
    if recipe.unit_sample is not None:
        share = plan.text_bytes() / max(1, total)
        notes.append(
            f"the sample is {counted(len(plan.units), 'whole unit')}, {share:.1%} of the text; "
            f"`sample='documents:{recipe.unit_sample:g}'` draws documents from all of it"
        )
    if spec.vocab_size in range(65_500, 65_537):
        notes.append(
            f"a vocabulary of {spec.vocab_size} is read as uint16 by some of Megatron's tools and as int32 by others"
        )
    return ResolvedBuild(recipe, listing, spec, replace(plan, identity=identity), tuple(notes))


def _check_used(recipe: Recipe, kinds: set[str]) -> None:
    """Refuse options of the recipe that do not apply to any of the sources."""
    have_columns = [format_of(kind).has_columns for kind in kinds]
    for option, value in (("text_column", recipe.text_column), ("template", recipe.template)):
        if value is not None and not any(have_columns):
            raise RecipeError(
                f"{option}: none of the sources has columns", hint="leave it out: text files are all text"
            )
    if recipe.documents not in BY_ROW and all(have_columns):
        raise RecipeError(
            "documents: none of the sources is a text file", hint="leave it out: rows and lines of JSON are documents"
        )


def make_config(setup: ResolvedBuild, *, scratch: str | None, only_look: bool = False) -> BuildConfig:
    """The settings that all units share. With `only_look`, it is not determined which documents are held out."""
    recipe = setup.recipe
    as_nanogpt = recipe.split == "nanogpt"
    return BuildConfig(
        scratch=scratch,
        root=setup.listing.root,
        fingerprint=setup.plan.fingerprint,
        documents=recipe.documents,
        eot=recipe.eot,
        eot_id=setup.spec.eot_id,
        vocab_size=setup.spec.vocab_size,
        dtype=setup.dtype,
        split=dict(sorted(recipe.split.items())) if isinstance(recipe.split, dict) else {},
        split_names=recipe.splits,
        seed=recipe.seed,
        min_chars=recipe.min_chars,
        max_document_bytes=recipe.max_document_bytes,
        filter=recipe.filter,
        on_bad=recipe.on_bad,
        document_sample=recipe.document_sample,
        max_documents=max_batch_documents(),
        keep_empty=as_nanogpt,
        held_out=_held_out(setup) if as_nanogpt and not only_look else None,
    )


def _held_out(setup: ResolvedBuild) -> dict[str, tuple[int, ...]]:
    recipe = setup.recipe
    return held_out(setup.plan, setup.listing.root, documents=recipe.documents, limit=recipe.max_document_bytes)


def _characters(plan: Plan, root: str, recipe: Recipe) -> str:
    """Every character of the sources, from one pass over them: the vocabulary of a character-level tokenizer."""
    seen = np.zeros(0x110000, np.bool_)
    for text in _texts(plan, root, recipe):
        seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
    return "".join(chr(point) for point in np.flatnonzero(seen))


def _texts(plan: Plan, root: str, recipe: Recipe) -> Iterable[str]:
    for unit in plan.units:
        sources = list(plan.sources[unit.source : unit.source + unit.num_sources])
        paths = [f"{root}/{source.name}" for source in sources]
        with naming_what_needs_memory(lambda: sources[0].name):  # noqa: B023 - called at once
            try:
                for batch in read_unit(
                    unit, paths, sources, documents=recipe.documents, limit=recipe.max_document_bytes
                ):
                    for data in batch.text.cast("large_binary").to_pylist():
                        yield data.decode(errors="ignore")
            except SourceError:
                continue  # the unit itself will report it


Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def held_out(plan: Plan, root: str, *, documents: str, limit: int) -> dict[str, tuple[int, ...]]:
    """Positions of the validation documents, by source."""
    found = [places for unit in plan.units for places in _unit_places(plan, unit, root, documents, limit)]
    if not found:  # the build itself reports that there is no document
        return {}
    sources = np.concatenate([sources for sources, _ in found])
    positions = np.concatenate([positions for _, positions in found])
    numbers = np.sort(original_permutation(len(positions))[: num_validation(len(positions))])
    chosen: dict[str, tuple[int, ...]] = {}
    for index in np.unique(sources[numbers]).tolist():
        mine = numbers[sources[numbers] == index]
        chosen[plan.sources[index].name] = tuple(positions[mine].tolist())
    return chosen


def _unit_places(plan: Plan, unit: Unit, root: str, documents: str, limit: int) -> Iterator[Places]:
    """Source and position of every document of a unit, in order, kept or not."""
    sources = list(plan.sources[unit.source : unit.source + unit.num_sources])
    paths = [f"{root}/{source.name}" for source in sources]
    if all(format_of(source.kind).has_sections for source in sources):
        for number, (path, source) in enumerate(zip(paths, sources, strict=True), start=unit.source):
            rows = _rows(path, source, unit)
            yield np.full(len(rows), number), rows
        return
    for batch in read_unit(unit, paths, sources, documents=documents, limit=limit):
        index = np.concatenate((batch.sources, [skip.source for skip in batch.skips])).astype(np.int64)
        at = np.concatenate((batch.positions, [skip.position for skip in batch.skips])).astype(np.int64)
        in_turn = np.lexsort((at, index))
        yield index[in_turn], at[in_turn]


def _rows(path: str, source: Source, unit: Unit) -> npt.NDArray[np.int64]:
    """The rows of a unit's sections, without reading their text."""
    ends = np.cumsum([0, *(section.num_rows for section in sections(path, source))])
    return np.arange(ends[unit.start], ends[unit.stop if unit.stop >= 0 else -1])
