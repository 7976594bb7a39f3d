from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill import records
from tokenmill.build.plan import FILE_BYTES, MANY_FILES, Plan, check_plan, counts_files, differences, make_plan
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.sources.base import Extent, Source, Unit, default_unit_bytes

PROPERTY = settings(max_examples=100, deadline=None, database=None)


def make_source(name: str, size: int = 100, **fields: Any) -> Source:
    known: dict[str, Any] = {"kind": "text", "compression": "", "modified": 1, "split": "", "text": {}}
    return Source(name=name, bytes=size, **{**known, **fields})


def planned(sources: list[Source], extents: list[Extent], **fields: Any) -> Plan:
    known: dict[str, Any] = {"identity": {"seed": 0}, "unit_bytes": 100, "sample": None, "seed": 0}
    return make_plan(sources=sources, extents=extents, **{**known, **fields})


def planned_as_asked(sources: list[Source], extents: list[Extent], **asked: Any) -> Plan:
    """A plan whose identity has what was asked, as that of a recipe has."""
    identity = {"seed": 0, "unit_bytes": asked["unit_bytes"], "sample": asked["sample"]}
    return planned(sources, extents, identity=identity, **asked)


def texts(*sizes: int, divisible: bool = True) -> tuple[list[Source], list[Extent]]:
    sources = [make_source(f"{index:04d}.txt", size) for index, size in enumerate(sizes)]
    return sources, [Extent(text_bytes=size, divisible=divisible) for size in sizes]


def test_a_large_text_is_cut_into_even_byte_ranges() -> None:
    plan = planned(*texts(1000), unit_bytes=300)
    assert [(unit.start, unit.stop) for unit in plan.units] == [(0, 333), (333, 666), (666, 1000)]
    assert [unit.text_bytes for unit in plan.units] == [333, 333, 334]


def test_what_cannot_be_cut_is_one_unit() -> None:
    plan = planned(*texts(1000, divisible=False), unit_bytes=300)
    assert [(unit.start, unit.stop, unit.text_bytes) for unit in plan.units] == [(0, -1, 1000)]


def test_small_sources_are_grouped_up_to_the_size_of_a_unit() -> None:
    plan = planned(*texts(30, 30, 30, 30, 90, 5), unit_bytes=100)
    assert [(unit.source, unit.num_sources, unit.text_bytes) for unit in plan.units] == [
        (0, 3, 90),
        (3, 1, 30),
        (4, 2, 95),
    ]
    assert all((unit.start, unit.stop) == (0, -1) for unit in plan.units)


def test_sources_of_different_splits_are_never_grouped() -> None:
    sources, extents = texts(10, 10, 10)
    sources[1] = replace(sources[1], split="val")
    plan = planned(sources, extents)
    assert [(unit.source, unit.num_sources) for unit in plan.units] == [(0, 1), (1, 1), (2, 1)]


def test_a_table_is_cut_between_its_sections() -> None:
    extent = Extent(text_bytes=60, sections=(10, 10, 10, 10, 10, 10))
    plan = planned([make_source("a.parquet", kind="parquet")], [extent], unit_bytes=20)
    assert [(unit.start, unit.stop, unit.text_bytes) for unit in plan.units] == [(0, 2, 20), (2, 4, 20), (4, 6, 20)]


def test_an_empty_source_is_a_unit_of_its_own_or_of_a_group() -> None:
    assert len(planned(*texts(0)).units) == 1
    assert [unit.num_sources for unit in planned(*texts(0, 0, 50)).units] == [3]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[Source], list[Extent]]:
    sources, extents = [], []
    for index in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["whole", "divisible", "sections"]))
        sections = tuple(draw(st.lists(st.integers(0, 500), min_size=1, max_size=12))) if kind == "sections" else ()
        size = draw(st.integers(0, 3000))
        extents.append(
            Extent(text_bytes=sum(sections) if sections else size, sections=sections, divisible=kind == "divisible")
        )
        sources.append(make_source(f"{index:03d}", size, split=draw(st.sampled_from(["", "", "val"]))))
    return sources, extents


@given(corpus=corpora(), unit_bytes=st.integers(1, 2000))
@PROPERTY
def test_units_cover_every_source_exactly_once_and_in_order(
    corpus: tuple[list[Source], list[Extent]], unit_bytes: int
) -> None:
    sources, extents = corpus
    plan = planned(sources, extents, unit_bytes=unit_bytes)
    assert [unit.index for unit in plan.units] == list(range(len(plan.units)))
    covered: dict[int, list[tuple[int, int]]] = {}
    for unit in plan.units:
        assert unit.num_sources >= 1
        for index in range(unit.source, unit.source + unit.num_sources):
            covered.setdefault(index, []).append((unit.start, unit.stop))
    assert list(covered) == list(range(len(sources)))
    for index, bounds in covered.items():
        end = len(extents[index].sections) or sources[index].bytes
        if bounds != [(0, -1)]:
            assert [bounds[0][0], *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), end]
            assert bounds[0][0] == 0
            assert all(start < stop for start, stop in bounds)
    assert plan.text_bytes() == sum(
        extent.text_bytes if not extent.divisible or covered[index] == [(0, -1)] else sources[index].bytes
        for index, extent in enumerate(extents)
    )


@given(corpus=corpora(), unit_bytes=st.integers(1, 2000))
@PROPERTY
def test_no_unit_of_divisible_text_or_of_a_group_is_much_larger_than_wanted(
    corpus: tuple[list[Source], list[Extent]], unit_bytes: int
) -> None:
    sources, extents = corpus
    for unit in planned(sources, extents, unit_bytes=unit_bytes).units:
        if unit.num_sources > 1:
            assert unit.text_bytes <= unit_bytes
        elif extents[unit.source].divisible:
            assert unit.text_bytes <= 1.5 * unit_bytes + 1


@given(corpus=corpora(), unit_bytes=st.integers(1, 500), sample=st.floats(0.001, 1), seed=st.integers(0, 1 << 61))
@PROPERTY
def test_a_sample_is_some_of_the_units_in_order_and_the_same_for_the_same_seed(
    corpus: tuple[list[Source], list[Extent]], unit_bytes: int, sample: float, seed: int
) -> None:
    whole = planned(*corpus, unit_bytes=unit_bytes).units
    one = planned(*corpus, unit_bytes=unit_bytes, sample=sample, seed=seed)
    assert one == planned(*corpus, unit_bytes=unit_bytes, sample=sample, seed=seed)
    assert len(one.units) == max(1, round(sample * len(whole)))
    assert [unit.index for unit in one.units] == list(range(len(one.units)))
    places = [(unit.source, unit.start, unit.stop, unit.num_sources, unit.text_bytes) for unit in whole]
    drawn = [(unit.source, unit.start, unit.stop, unit.num_sources, unit.text_bytes) for unit in one.units]
    remaining = iter(places)
    assert all(place in remaining for place in drawn)


def test_another_seed_draws_other_units() -> None:
    corpus = texts(100_000)
    drawn = {planned(*corpus, sample=0.05, seed=seed).units for seed in range(5)}
    assert len(drawn) == 5


def test_the_default_unit_grows_with_the_corpus_within_bounds() -> None:
    sizes = [default_unit_bytes(total) for total in (0, 10**6, 10**9, 10**11, 10**12, 10**15)]
    assert sizes == sorted(sizes)
    assert sizes[0] == sizes[1] >= 10**6
    assert sizes[-1] == 2_000_000_000
    assert 256 <= 10**11 / default_unit_bytes(10**11) <= 320


def test_a_corpus_that_grows_by_little_is_cut_as_before() -> None:
    totals = [10**11 + number * 10**8 for number in range(1000)]
    sizes = [default_unit_bytes(total) for total in totals]
    assert len(set(sizes)) < 8
    assert all(size <= total // 256 for size, total in zip(sizes, totals, strict=True))


def test_a_sample_of_a_small_corpus_is_drawn_from_smaller_units() -> None:
    assert default_unit_bytes(10**9, sample=0.01) < default_unit_bytes(10**9)


def test_the_fingerprint_does_not_cover_the_time_of_a_source() -> None:
    sources, extents = texts(100)
    later = [replace(source, modified=2) for source in sources]
    assert planned(sources, extents).fingerprint == planned(later, extents).fingerprint


@pytest.mark.parametrize(
    "change", [{"name": "x"}, {"bytes": 101}, {"split": "val"}, {"kind": "jsonl"}, {"text": {"column": "a"}}]
)
def test_the_fingerprint_covers_everything_else_of_a_source(change: dict[str, Any]) -> None:
    sources, extents = texts(100)
    changed = [replace(source, **change) for source in sources]
    assert planned(sources, extents).fingerprint != planned(changed, extents).fingerprint


def test_the_fingerprint_covers_the_identity_and_the_units() -> None:
    corpus = texts(1000)
    base = planned(*corpus)
    assert base.fingerprint != planned(*corpus, identity={"seed": 1}).fingerprint
    assert base.fingerprint != planned(*corpus, unit_bytes=200).fingerprint


def test_a_plan_can_be_sealed_and_read_back() -> None:
    plan = planned(*texts(1000, 20, 30))
    back = records.unseal(Plan, records.seal(plan), where="plan")
    assert back == plan
    assert back.fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2, this tokenmill reads 1"),
        ({"target_tokens": 0}, "0 tokens a shard"),
        ({"identity": {"max_tokens": "many"}}, "a budget of 'many' tokens"),
        ({"identity": {"max_tokens": -1}}, "a budget of -1 tokens"),
    ],
)
def test_a_plan_with_values_that_no_plan_has_is_refused(change: dict[str, Any], says: str) -> None:
    plan = planned(*texts(1000, 20, 30))
    check_plan(plan, where="plan")
    with pytest.raises(DatasetError, match=f"plan: {says}"):
        check_plan(replace(plan, **change), where="plan")


@pytest.mark.parametrize(
    "change", [{"index": 7}, {"source": 9}, {"source": -1}, {"num_sources": 0}, {"num_sources": 9}, {"start": -1}]
)
def test_a_plan_with_a_unit_that_cannot_be_is_refused(change: dict[str, int]) -> None:
    plan = planned(*texts(1000, 20, 30))
    units = (replace(plan.units[0], **change), *plan.units[1:])
    with pytest.raises(DatasetError, match="plan: "):
        check_plan(replace(plan, units=units), where="plan")


def test_equal_plans_do_not_differ() -> None:
    corpus = texts(100, 200)
    assert differences(planned(*corpus), planned(*corpus)) == []


def test_differences_show_both_values_of_what_differs() -> None:
    sources, extents = texts(100, 200, 300)
    old = planned(sources, extents, identity={"seed": 0, "eot": "append", "tokenizer": "x"})
    new = planned(
        [replace(sources[0], bytes=150), replace(sources[1], text={"column": "a"}), make_source("9999.txt", 300)],
        extents,
        identity={"seed": 0, "eot": "none", "split": {"val": 0.1}, "tokenizer": "x"},
    )
    lines = differences(old, new)
    assert "eot: was 'append', now 'none'" in lines
    assert "split: was None, now {'val': 0.1}" in lines
    assert "source 0000.txt: was 100 bytes, now 150" in lines
    assert any(line.startswith("source 0001.txt: was {") for line in lines)
    assert "source 0002.txt: is gone" in lines
    assert "source 9999.txt: was not there" in lines
    assert len(lines) == 6


def test_plans_that_differ_in_their_units_alone_say_so() -> None:
    corpus = texts(1000)
    assert differences(planned(*corpus), planned(*corpus, unit_bytes=200)) == ["the sources are cut into other units"]


def test_more_units_than_anybody_needs_are_refused_with_a_size_that_will_do() -> None:
    source = Source(name="a.txt", kind="text", compression="", bytes=16_000_000, modified=0, split="", text={})
    extents = [Extent(text_bytes=16_000_000, divisible=True)]
    options: dict[str, Any] = {"identity": {}, "sources": [source], "extents": extents, "sample": None, "seed": 0}
    with pytest.raises(RecipeError, match="16,000,000, more than") as caught:
        make_plan(unit_bytes=1, **options)
    assert "`unit_bytes=5` or more" in caught.value.hint
    assert len(make_plan(unit_bytes=10_000, **options).units) == 1600


# How 0.1 cut sources, written down once more. Plans of it are on disks, so whatever has no very many small files must
# have the same plan, byte for byte.


def plan_of_0_1(sources: list[Source], extents: list[Extent], unit_bytes: int | None, sample: float | None) -> Plan:
    total = sum(extent.text_bytes for extent in extents)
    if unit_bytes is not None:
        size = unit_bytes
    elif sample is not None:
        size = max(10**6, min(rounded_down(int(total * sample) // 64), 2 * 10**9))
    else:
        size = max(32 * 10**6, min(rounded_down(total // 256), 2 * 10**9))
    cut = list(units_of_0_1(sources, extents, size))
    if sample is not None:
        count = max(1, round(sample * len(cut)))
        cut = [cut[number] for number in sorted(random.Random(0).sample(range(len(cut)), count))]
    units = tuple(
        Unit(index=index, source=source, num_sources=count, start=start, stop=stop, text_bytes=text_bytes)
        for index, (source, count, start, stop, text_bytes) in enumerate(cut)
    )
    identity = {"seed": 0, "unit_bytes": unit_bytes, "sample": sample}
    return Plan(format=1, identity=identity, sources=tuple(sources), units=units, target_tokens=max(1, size // 16))


def rounded_down(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 3)
    return size - size % step


def units_of_0_1(sources: list[Source], extents: list[Extent], size: int) -> Iterator[tuple[int, int, int, int, int]]:
    at = 0
    while at < len(sources):
        end, text_bytes = at + 1, extents[at].text_bytes
        while end < len(sources) and sources[end].split == sources[at].split:
            if text_bytes + extents[end].text_bytes > size:
                break
            text_bytes += extents[end].text_bytes
            end += 1
        if end - at > 1:
            yield at, end - at, 0, -1, text_bytes
        else:
            yield from ((at, 1, *part) for part in parts_of_0_1(sources[at], extents[at], size))
        at = end


def parts_of_0_1(source: Source, extent: Extent, size: int) -> Iterator[tuple[int, int, int]]:
    parts = max(1, round(extent.text_bytes / size))
    if extent.sections:
        whole, before, begin = sum(extent.sections), 0, 0
        numbers = []
        for weight in extent.sections:
            numbers.append((2 * before + weight) * parts // (2 * whole) if whole else 0)
            before += weight
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1]:
                yield begin, end, sum(extent.sections[begin:end])
                begin = end
    elif extent.divisible and parts > 1:
        for part in range(parts):
            start, stop = source.bytes * part // parts, source.bytes * (part + 1) // parts
            yield start, stop, stop - start
    else:
        yield 0, -1, extent.text_bytes


@st.composite
def real_corpora(draw: st.DrawFn) -> tuple[list[Source], list[Extent]]:
    """Sizes as they are of files: few of any size, or very many that are not small."""
    is_many = draw(st.booleans())
    count = draw(st.integers(MANY_FILES, 6000) if is_many else st.integers(1, MANY_FILES - 1))
    least = FILE_BYTES + 1 if is_many else 0
    most = draw(st.sampled_from([40_000, 10**6, 10**8, 10**10]))
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    sources, extents = [], []
    for index in range(count):
        size = chance.choice([least, chance.randint(least, most)])
        rows = [chance.randint(0, size // 3 + 1) for _ in range(chance.randint(1, 6))]
        kind = chance.choice(["whole", "divisible", "divisible", "sections"])
        sections = (*rows, max(0, size - sum(rows))) if kind == "sections" else ()
        sources.append(make_source(f"{index:05d}", size, split="val" if chance.random() < 0.01 else ""))
        extents.append(Extent(text_bytes=sum(sections) or size, sections=sections, divisible=kind == "divisible"))
    return sources, extents


@given(
    corpus=real_corpora(),
    unit_bytes=st.sampled_from([None, None, None, 1_000_000, 64_000_000, 4_000_000_000]),
    sample=st.sampled_from([None, None, 0.01, 0.5]),
)
@settings(max_examples=12, deadline=None, database=None)
def test_what_has_not_very_many_small_files_is_cut_as_by_0_1(
    corpus: tuple[list[Source], list[Extent]], unit_bytes: int | None, sample: float | None
) -> None:
    sources, extents = corpus
    expected = plan_of_0_1(sources, extents, unit_bytes, sample)
    found = planned_as_asked(sources, extents, unit_bytes=unit_bytes, sample=sample)
    assert records.seal(found) == records.seal(expected)
    assert counts_files(found)


@given(corpus=corpora(), unit_bytes=st.integers(1, 2000), sample=st.sampled_from([None, 0.3]))
@PROPERTY
def test_tiny_units_are_cut_as_by_0_1(
    corpus: tuple[list[Source], list[Extent]], unit_bytes: int, sample: float | None
) -> None:
    expected = plan_of_0_1(*corpus, unit_bytes, sample)
    assert records.seal(planned_as_asked(*corpus, unit_bytes=unit_bytes, sample=sample)) == records.seal(expected)


@pytest.mark.parametrize("sizes", [[550] * 70_000, [0] * 9_000, [100, 60_000] * 20_000, [3] * 5_000 + [10**8] * 9])
@pytest.mark.parametrize("sample", [None, 0.1])
def test_without_counting_files_anything_is_cut_as_by_0_1(sizes: list[int], sample: float | None) -> None:
    sources, extents = texts(*sizes, divisible=False)
    expected = plan_of_0_1(sources, extents, None, sample)
    found = planned_as_asked(sources, extents, unit_bytes=None, sample=sample, count_files=False)
    assert records.seal(found) == records.seal(expected)
    if sample is None:
        assert not counts_files(found)
        assert counts_files(planned(sources, extents, unit_bytes=None))


def test_very_many_small_files_are_many_units_of_about_the_same_work() -> None:
    corpus = texts(*[550] * 100_000)
    counts = [unit.num_sources for unit in planned(*corpus, unit_bytes=None).units]
    assert len(counts) > 90
    assert (min(counts), max(counts)) > (900, 900)
    assert max(counts) - min(counts) <= 1 + max(counts) // 50
    assert len(planned(*corpus, unit_bytes=None, count_files=False).units) == 2


def test_millions_of_small_files_are_not_cut_into_dust() -> None:
    """A unit takes some files that are synced; a plan has a few hundred where it can."""
    for count in (10_000, 70_000):
        plan = planned(*texts(*[900] * count), unit_bytes=None)
        assert 8 <= len(plan.units) <= 512
        assert max(unit.text_bytes for unit in plan.units) <= 32_000_000


def test_few_small_files_beside_large_ones_are_cut_as_before() -> None:
    sizes = [10**8] * 300 + [1_000] * (MANY_FILES - 1)
    assert planned(*texts(*sizes), unit_bytes=None) == planned(*texts(*sizes), unit_bytes=None, count_files=False)


def test_a_given_unit_size_is_how_much_work_a_unit_of_small_files_has() -> None:
    counts = {
        size: max(unit.num_sources for unit in planned(*texts(*[500] * 50_000), unit_bytes=size).units)
        for size in (32_000_000, 320_000_000)
    }
    assert counts[320_000_000] > 9 * counts[32_000_000]


def test_a_large_file_among_small_ones_has_few_of_them_in_its_unit() -> None:
    sizes = [10] * 5_000 + [20_000_000] + [10] * 5_000
    units = planned(*texts(*sizes), unit_bytes=None).units
    work = [unit.text_bytes + FILE_BYTES * unit.num_sources for unit in units]
    assert max(work) < 2 * 32_000_000
    assert len(units) == 10


def test_a_source_with_cuts_is_cut_only_there() -> None:
    extent = Extent(text_bytes=100, cuts=(0, 10, 45, 50, 90, 100))
    source = Source(name="a", kind="csv", compression="", bytes=100, modified=0, split="", text={})
    plan = make_plan(identity={}, sources=[source], extents=[extent], unit_bytes=30, sample=None, seed=0)
    assert [(unit.start, unit.stop, unit.text_bytes) for unit in plan.units] == [
        (0, 45, 45),
        (45, 50, 5),
        (50, 100, 50),
    ]
