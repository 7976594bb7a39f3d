from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tokenmill.sources import jsonl
from tokenmill.sources.base import Source, SourceSlice, Unit
from tokenmill.sources.files import recognise
from tokenmill.sources.jsonl import JsonLinesFormat
from tokenmill.sources.reader import read_unit

BOM = b"\xef\xbb\xbf"
Found = tuple[list[tuple[int, str]], list[tuple[int, str]]]

BAD_LINES = [
    (b"not json", "invalid_json"),
    (b'{"text": "cut', "invalid_json"),
    (b'{"text": "twice"}{"text": "twice"}', "invalid_json"),
    (b'{"text": "tail"} x', "invalid_json"),
    (b'"a string"', "invalid_json"),
    (b"[1, 2]", "invalid_json"),
    (b"null", "invalid_json"),
    (b"\x00", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"text": "control \x01"}', "invalid_json"),
    (b'{"other": 1}', "missing_field"),
    (b"{}", "missing_field"),
    (b'{"text": null}', "null_text"),
    (b'{"text": "half \\ud83d pair"}', "lone_surrogate"),
    (b'{"text": "half \\ude00 pair"}', "lone_surrogate"),
    (b'{"text": "\xff\xfe"}', "invalid_utf8"),
    (b'{"text": "cut \xe6\xbc"}', "invalid_utf8"),
    (b'{"text": 7}', "not_text"),
    (b'{"text": true}', "not_text"),
    (b'{"text": ["a"]}', "not_text"),
    (b'{"text": {"a": "b"}}', "not_text"),
]

BAD_IDS = [f"{number}-{reason}" for number, (_, reason) in enumerate(BAD_LINES)]
# Lines that parsers disagree about: whatever becomes of one, it must be the same beside any other.
ODD_LINES = [
    *(line for line, _ in BAD_LINES),
    b"",
    b" \t\r",
    b"\xc2\xa0",
    BOM + b'{"text": "mark"}',
    b'{"text": "good"}',
    b'{"text": ""}',
    b'{"text": "first", "text": "last"}',
    b'{"text": null, "text": "last"}',
    b'{"text": 7, "text": "last"}',
    b'{"text": "first", "text": 7}',
    b'{"text": "a", "x": 1, "x": 2}',
    b'{"text": "a", "x": NaN}',
    b'{"text": "a", "x": -Infinity}',
    b'{"text": "a", "x": 1e999}',
    b'{"text": "a", "x": ' + b"9" * 400 + b"}",
    b'{"text": "a", "x": 01}',
    b'{"text": "a", "x": 1.}',
    b'{"text": "a", "x": +1}',
    b'{"text": "a", "x": "\xff"}',
    b'{"text": "a", "\xff": 1}',
    b'{"text": "a", "x": "\\ud83d"}',
    b'{"text": "a", "\\ud83d": 1}',
    b'{"text": "a", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"text": "a", "x": "tab\t"}',
    b'{"text": "a",}',
    b"{'text': 'a'}",
    b'{"text": "a"} // comment',
    b'{"text": "\\u0000"}',
    b'{"text": "\\x41"}',
    b'{"\\u0074ext": "escaped key"}',
    b'{"text": "2020-01-01T00:00:00Z"}',
    b'{"text": "a"} {"text": "b"}',
    b'{"text":',
    b'"a"}',
    b'{"TEXT": "a"}',
]


def read(path: Path, rule: dict[str, Any] | None = None, start: int = 0, stop: int = -1) -> Found:
    """Documents and skips, with their positions; texts that are not UTF-8 are left for the unit to skip."""
    source = Source(
        name=path.name, kind="jsonl", compression="", bytes=0, modified=0, split="", text=rule or {"column": "text"}
    )
    documents, skips = [], []
    for batch in JsonLinesFormat().read(
        SourceSlice(path=str(path), index=5, source=source, start=start, stop=stop), limit=1 << 30
    ):
        assert set(batch.sources.tolist()) <= {5}
        for position, text in zip(batch.positions.tolist(), batch.text.cast("large_binary").to_pylist(), strict=True):
            try:
                documents.append((position, text.decode()))
            except UnicodeDecodeError:
                skips.append((position, "invalid_utf8"))
        skips += [(skip.position, skip.reason) for skip in batch.skips]
    return documents, sorted(skips)


def write(path: Path, lines: list[bytes], end: bytes = b"\n") -> list[int]:
    """Write lines, and give the position of each."""
    positions, data = [], b""
    for line in lines:
        positions.append(len(data))
        data += line + end
    path.write_bytes(data)
    return positions


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES, ids=BAD_IDS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_line_is_skipped_with_its_reason_and_its_neighbours_survive(
    tmp_path: Path, bad: bytes, reason: str, place: int
) -> None:
    lines = [b'{"text": "one"}', '{"text": "zwölf"}'.encode()]
    lines.insert(place, bad)
    positions = write(tmp_path / "f.jsonl", lines)
    documents, skips = read(tmp_path / "f.jsonl")
    assert skips == [(positions.pop(place), reason)]
    assert documents == list(zip(positions, ["one", "zwölf"], strict=True))


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES, ids=BAD_IDS)
def test_a_bad_line_is_told_alike_when_the_text_comes_from_several_fields(
    tmp_path: Path, bad: bytes, reason: str
) -> None:
    positions = write(tmp_path / "f.jsonl", [b'{"text": "one", "x": "1"}', bad.replace(b'"text"', b'"x": "", "text"')])
    documents, skips = read(tmp_path / "f.jsonl", {"join": ["text", "x"]})
    assert documents == [(0, "one\n\n1")]
    assert skips == [(positions[1], reason)]


def test_all_kinds_of_bad_lines_in_one_file_keep_their_places(tmp_path: Path) -> None:
    good = b'{"text": "good"}'
    lines = [line for bad, _ in BAD_LINES for line in (good, bad)]
    positions = write(tmp_path / "f.jsonl", lines)
    documents, skips = read(tmp_path / "f.jsonl")
    assert documents == [(position, "good") for position in positions[::2]]
    assert skips == list(zip(positions[1::2], [reason for _, reason in BAD_LINES], strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What becomes of each odd line in a file of its own: its text or its reason, or neither if it is blank."""
    path = tmp_path_factory.mktemp("alone") / "f.jsonl"
    found = []
    for line in ODD_LINES:
        path.write_bytes(b"\n" + line)  # not at the very beginning, where a byte order mark is none of the text
        documents, skips = read(path)
        assert len(documents) + len(skips) <= 1, line
        found.append((documents[0][1] if documents else "", skips[0][1] if skips else ""))
    return found


# Where it is blank, all are judged one by one; else only if one is odd. What is beyond ASCII goes to another parser.
@pytest.mark.parametrize("first", ["", "good", "漢字" * 400])
@given(chosen=st.lists(st.integers(0, len(ODD_LINES) - 1), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None, database=None)
@example(chosen=[ODD_LINES.index(b'{"text": "a"} {"text": "b"}'), ODD_LINES.index(b"")])
@example(chosen=[ODD_LINES.index(b'{"text":'), ODD_LINES.index(b'"a"}')])
def test_what_becomes_of_a_line_does_not_depend_on_its_neighbours(
    tmp_path_factory: pytest.TempPathFactory, alone: list[tuple[str, str]], first: str, chosen: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"neighbours-{first[:4]}.jsonl"
    line = json.dumps({"text": first}, ensure_ascii=False).encode() if first else b""
    positions = write(path, [line, *(ODD_LINES[i] for i in chosen)])[1:]
    assume(recognise(path.read_bytes()) is None)  # a file of nothing but odd bytes is refused as a whole
    blank = [not ODD_LINES[i] or ODD_LINES[i].isspace() for i in chosen]
    expected = [(at, *alone[i]) for at, i, is_blank in zip(positions, chosen, blank, strict=True) if not is_blank]
    expected = [(0, first, ""), *expected] if first else expected
    documents, skips = read(path)
    found = sorted([(at, text, "") for at, text in documents] + [(at, "", reason) for at, reason in skips])
    assert found == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (rb'{"text": "\\\\\ude00"}', "lone_surrogate"),  # behind an escaped backslash
        (rb'{"text": "\\\\\\ude00"}', ""),  # an escaped backslash and letters
        (rb'{"text": "\\ud83d\ude00"}', "lone_surrogate"),
        (rb'{"text": "\ud83d\ude00"}', ""),
        (rb'{"text": "\ud83d\ude00\ude00"}', "lone_surrogate"),
        (rb'{"x": "\ud83d", "x": "", "text": "a"}', "invalid_json"),  # as Python's parser has it, there is none
        (rb'{"x": ["\ud83d"], "text": "a"}', "lone_surrogate"),
        (rb'{"\ud83d": 1, "text": "a"}', "lone_surrogate"),
        (rb'{"text": "\ud83d"} x}', "invalid_json"),
        ('{"text": "é\\ud83d"}'.encode(), "lone_surrogate"),
        (b'{"text": "\xff\\ud83d"}', "invalid_json"),
        (b'{"text": "a", "x": 1e999}', ""),
        (b'{"x": 1e999, "text": "\xff"}', "invalid_json"),
        (b'{"x": 1, "text": "\xff"}', "invalid_utf8"),
        (b'{"text": "\xff", "text": "a"}', "invalid_utf8"),
        (b'{"x": Inf, "text": "a"}', ""),
        (b'{"x": Inf, "text": a}', "invalid_json"),
        (b'{"x": [: NaN], "text": "a"}', "invalid_json"),
        (b'{"te\x00xt": "a"}', "invalid_json"),
    ],
)
def test_the_reason_of_a_line_is_that_of_datasets_that_exist(tmp_path: Path, line: bytes, reason: str) -> None:
    """Reasons are part of a dataset's bytes, so that no shortcut may change one."""
    write(tmp_path / "f.jsonl", [b'{"text": "good"}', line])
    documents, skips = read(tmp_path / "f.jsonl")
    assert len(documents) == 1 + (not reason)
    assert [found for _, found in skips] == [reason] * bool(reason)


@pytest.mark.parametrize(
    ("line", "parsers"),
    [
        (rb'{"text": "\ud800"}', {"fields"}),
        (rb'{"text": "\ud800", "x": [["\ud800"]]}', {"fields"}),
        (b'{"text": "cut}', {"row"}),
        (b'{"text": "\xff' + b"a" * 99 + b'"}', {"row"}),
        (b"not json", {"any"}),
    ],
)
def test_a_bad_line_is_given_to_one_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, parsers: set[str]
) -> None:
    """An exception takes ten times as long as a good line."""
    asked: list[str] = []

    def watch(name: str, parse: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: asked.append(name) or parse(*arguments)  # type: ignore[func-returns-value]

    row = jsonl._row_decoder("text")
    watched = SimpleNamespace(decode=watch("row", row.decode), decode_lines=row.decode_lines)
    monkeypatch.setattr(jsonl, "_row_decoder", lambda column: watched)
    monkeypatch.setattr(jsonl.msgspec.json, "decode", watch("any", jsonl.msgspec.json.decode))
    monkeypatch.setattr(jsonl.json, "loads", watch("python", jsonl.json.loads))
    named = jsonl.fields_decoder()
    watched_fields = SimpleNamespace(decode=watch("fields", named.decode))
    monkeypatch.setattr(jsonl, "fields_decoder", lambda: watched_fields)
    write(tmp_path / "f.jsonl", [line] * 9)
    assert len(read(tmp_path / "f.jsonl")[1]) == 9
    assert (set(asked), len(asked)) == (parsers, 9)


OPEN, CLOSED = b"[" * 600, b"[" * 300 + b"]" * 300
WIDE = b"[" + b",".join([b"[1,{}]"] * 1000) + b"]"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (rb'{"text": "\ud800", "x": ' + OPEN + b"}", "invalid_json"),
        (rb'{"text": "\ud800", "x": ' + CLOSED + b"}", "lone_surrogate"),
        (rb'{"x": "\ud800", "text": "a", "y": ' + CLOSED + b"}", "lone_surrogate"),
        (rb'{"text": "\ud800", "x": ' + WIDE + b"}", "lone_surrogate"),
        (rb'{"x": ' + WIDE + rb', "text": "a [[\ud800"}', "lone_surrogate"),
        (rb'{"x": ["\ud800", ' + CLOSED + b'], "text": "a"}', "lone_surrogate"),
        (rb'{"x": "\ud800", "x" : ' + CLOSED + b', "text": 1}', "invalid_json"),
        (rb'{"text": "\ud800", "x": ' + CLOSED[:-1] + b"x]}", "invalid_json"),
        (b'{"text": "\\n\xff", "x": ' + OPEN + b"}", "invalid_utf8"),
        (b'{"text": "\\n\xff", "x": ' + CLOSED + b"}", "invalid_utf8"),
        (b'{"text": "\\n", "y": "\xff", "x": ' + CLOSED + b"}", ""),
        (b'{"text": "a", "y": NaN, "x": ' + CLOSED + b"}", ""),
        (b'{"text": "a", "y": NaN, "x": ' + OPEN + b"}", "invalid_json"),
        (b'{"text": "a", "y": NaN, "x": ' + CLOSED[:-1] + b"x]}", "invalid_json"),
        (b'{"text": "a", "x": ' + b"[" * 3000 + b"}", "invalid_json"),
        (b'{"text": "a", "x": "\\ud800", "y": ' + b"[" * 3000 + b"}", "invalid_json"),
    ],
)
def test_pythons_parser_is_not_given_lines_of_many_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, reason: str
) -> None:
    """It takes hundreds of times as long as a good line, and gives the same reason."""
    write(tmp_path / "f.jsonl", [line])
    monkeypatch.setattr(jsonl, "_has_surrogate", None)
    found = [why for _, why in read(tmp_path / "f.jsonl")[1]]
    assert found == [reason] * bool(reason)


HALVES = [
    rb"\ud800",
    rb"\uDE00",
    rb"\ud83d\ude00",
    b"\xed\xa0\x80",
    b"\\\\",
    b"NaN",
    b"",
    b"\xff",
    rb"\n",
    rb"\uffff",
    b'\\"',
]
NAMES = [b'"text"', b'"x"', rb'"\u0078"', rb'"\ud800"']
VALUES = [b"1", b"NaN", b"-Infinity", b"Inf", b"1e999", b"9" * 4301, b"01", b"null", b"[" * 100 + b"]" * 100]
STRINGS = st.lists(st.sampled_from(HALVES), max_size=3).map(lambda parts: b'"' + b"".join(parts) + b'"')


def objects(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    field = st.tuples(st.one_of(st.sampled_from(NAMES), STRINGS), inner).map(b": ".join)
    return st.lists(field, max_size=3).map(lambda some: b"{" + b", ".join(some) + b"}")


NESTED = st.recursive(
    st.one_of(STRINGS, st.sampled_from(VALUES)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda some: b"[" + b",".join(some) + b"]"), objects(inner)
    ),
    max_leaves=6,
)


@given(line=objects(NESTED), cut=st.one_of(st.none(), st.integers(0, 200)))
@settings(max_examples=400, deadline=None, database=None)
def test_half_of_a_pair_is_found_where_pythons_parser_finds_it(line: bytes, cut: int | None) -> None:
    line = line if cut is None else line[:cut] + line[cut + 1 :]
    assert jsonl._has_lone_surrogate(line) == jsonl._has_surrogate(line)


@pytest.mark.parametrize("depth", [900, 975, 976, 1200])
@pytest.mark.parametrize("frames", [0, 100])
def test_how_deep_a_line_may_be_does_not_depend_on_who_reads_it(depth: int, frames: int) -> None:
    """The number of workers decides how many calls are below."""

    def below(frames: int) -> bool:
        if frames:
            return below(frames - 1)
        return jsonl._has_lone_surrogate(rb'{"text": "\ud800", "x": ' + b"[" * depth + b"]" * depth + b"}")

    assert below(frames) == (depth < 976)


def test_a_string_left_open_is_searched_once() -> None:
    """From each of its quotes on, 100,000 of them take minutes."""
    searched = jsonl._STRING.findall(b'{"x": [[, "' + b'\\"' * 100_000)
    assert [len(string) for string in searched] == [3, 200_001]


def test_a_run_of_good_lines_is_parsed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_judge_lines", None)
    for text in ("good", "漢字"):
        positions = write(tmp_path / "f.jsonl", [json.dumps({"id": 1, "text": text}, ensure_ascii=False).encode()] * 9)
        assert read(tmp_path / "f.jsonl") == ([(at, text) for at in positions], [])


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "\\ud800"}',
        b'{"id": "\\udc00", "text": "a"}',
        b'{"text": "\xff"}',
        b'{"id": NaN, "text": null}',
        b'{"id": NaN, "text": NaN}',
        b'{"id": NaN, "text": "good"}',
        b'{"id": Inf, "text": "good"}',
        b'{"text": "a"} trailing}',
        b"{not JSON}",
        b'{"text": ["a"]}',
        b'{"id": Inf, "text": words, Info}',
        b'{"id": -NaN, "text": "cut}',
        b'{"text": "a", "x": ' + b"[" * 3000 + b"}",
        b'{"text": "\xff", "x": NaN',
    ],
)
def test_arrow_is_asked_for_all_odd_lines_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    """To ask it for each of a million takes minutes."""
    asked: list[int] = []
    parse = jsonl._arrow_column

    def counted(data: bytes, column: str, num_lines: int) -> object:
        asked.append(num_lines)
        return parse(data, column, num_lines)

    monkeypatch.setattr(jsonl, "_arrow_column", counted)
    write(tmp_path / "one.jsonl", [line])
    write(tmp_path / "many.jsonl", [line] * 500)
    (one, why), (many, why_many) = read(tmp_path / "one.jsonl"), read(tmp_path / "many.jsonl")
    assert [text for _, text in many] == [text for _, text in one] * 500
    assert [reason for _, reason in why_many] == [reason for _, reason in why] * 500
    assert len(asked) <= 4


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n", b"\n  \t\n", b" \r\n\r\n"])
@pytest.mark.parametrize("bom", [b"", BOM])
def test_blank_lines_line_ends_and_a_byte_order_mark_are_no_documents(tmp_path: Path, end: bytes, bom: bytes) -> None:
    first, second = b'{"text": "one"}', b'{"text": "two"}'
    (tmp_path / "f.jsonl").write_bytes(bom + first + end + second + end)
    assert read(tmp_path / "f.jsonl") == (
        [(len(bom), "one"), (len(bom + first + end), "two")],
        [],
    )


def test_a_last_line_needs_no_end(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}')
    assert read(tmp_path / "f.jsonl") == ([(0, "one"), (16, "two")], [])


@pytest.mark.parametrize("data", [b"", b"\n", b"\n\n \n", BOM, BOM + b"\n"])
def test_a_file_without_objects_has_no_documents(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f.jsonl").write_bytes(data)
    assert read(tmp_path / "f.jsonl") == ([], [])
    assert list(jsonl.fields(str(tmp_path / "f.jsonl"), "")) == []


def test_an_empty_text_is_a_document(tmp_path: Path) -> None:
    write(tmp_path / "f.jsonl", [b'{"text": ""}'])
    assert read(tmp_path / "f.jsonl") == ([(0, "")], [])


def test_a_line_with_spaces_around_its_object_is_good(tmp_path: Path) -> None:
    write(tmp_path / "f.jsonl", [b'  {"text" :\t"one"}  ', b'{"text": "two"}'])
    assert read(tmp_path / "f.jsonl") == ([(0, "one"), (21, "two")], [])


def test_two_objects_on_a_line_and_a_blank_line_do_not_make_up_for_each_other(tmp_path: Path) -> None:
    positions = write(tmp_path / "f.jsonl", [b'{"text": "a"} {"text": "b"}', b"", b'{"text": "c"}'])
    assert read(tmp_path / "f.jsonl") == ([(positions[2], "c")], [(0, "invalid_json")])


def test_an_object_over_two_lines_is_two_bad_lines(tmp_path: Path) -> None:
    positions = write(tmp_path / "f.jsonl", [b'{"text":', b'"a"}', b'{"text": "b"}'])
    assert read(tmp_path / "f.jsonl") == (
        [(positions[2], "b")],
        [(0, "invalid_json"), (positions[1], "invalid_json")],
    )


def test_an_object_over_two_lines_beside_two_objects_on_a_line_is_bad_too(tmp_path: Path) -> None:
    positions = write(tmp_path / "f.jsonl", [b'{"text":', b'"a"}', b'{"text": "b"} {"text": "c"}'])
    assert read(tmp_path / "f.jsonl") == ([], [(position, "invalid_json") for position in positions])


def test_escaped_pairs_and_nul_characters_are_text(tmp_path: Path) -> None:
    write(tmp_path / "f.jsonl", [rb'{"text": "\ud83d\ude00 \u0000 \n \u2028"}'])
    assert read(tmp_path / "f.jsonl") == ([(0, "😀 \0 \n \u2028")], [])


def test_a_lone_surrogate_in_another_field_makes_the_line_bad(tmp_path: Path) -> None:
    write(tmp_path / "f.jsonl", [rb'{"text": "one", "x": "\ud83d"}', b'{"text": "two", "x": 1}'])
    documents, _ = read(tmp_path / "f.jsonl")
    assert [text for _, text in documents][-1] == "two"


def test_a_key_that_stands_twice_counts_the_last_time_alone_or_beside_a_bad_line(tmp_path: Path) -> None:
    twice = b'{"text": "first", "text": "last"}'
    write(tmp_path / "a.jsonl", [twice])
    write(tmp_path / "b.jsonl", [twice, b"bad"])
    assert read(tmp_path / "a.jsonl")[0] == read(tmp_path / "b.jsonl")[0] == [(0, "last")]


@pytest.mark.parametrize("column", ["a b", "日本", "class", "_x", 'quo"te', "a.b", "1", ""])
def test_any_field_name_may_hold_the_text(tmp_path: Path, column: str) -> None:
    write(tmp_path / "f.jsonl", [json.dumps({"x": 1, column: "found"}).encode()])
    assert read(tmp_path / "f.jsonl", {"column": column}) == ([(0, "found")], [])


def test_turns_and_templates_are_read_from_lines(tmp_path: Path) -> None:
    row = {"n": 1, "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    write(tmp_path / "f.jsonl", [json.dumps(row).encode()])
    assert read(tmp_path / "f.jsonl", {"turns": "messages"}) == ([(0, "Hi\n\nHo")], [])
    assert read(tmp_path / "f.jsonl", {"template": "no. {n}"}) == ([(0, "no. 1")], [])


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        ([b'{"b": 1, "a": 2}', b'{"c": 1}'], [["b", "a"], ["c"]]),
        ([b"bad", b"", b"[1]", b"{}", b"{", b' {"b": [{"c": 1}]}\r'], [["b"]]),
        ([b"bad"], []),
    ],
)
@pytest.mark.parametrize("bom", [b"", BOM])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_fields_of_each_object_at_the_beginning_are_told(
    tmp_path: Path, lines: list[bytes], fields: list[list[str]], bom: bytes, end: bytes
) -> None:
    (tmp_path / "f.jsonl").write_bytes(bom + b"\n".join(lines) + end)
    assert list(chain.from_iterable(jsonl.fields(str(tmp_path / "f.jsonl"), ""))) == fields


def test_no_more_is_read_of_a_file_than_the_objects_that_are_asked_for_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "x"}\n' * 1_000_000)
    decoded: list[bytes] = []

    def field_names(line: bytes) -> list[str]:
        decoded.append(line)
        return ["text"]

    monkeypatch.setattr(jsonl, "_field_names", field_names)
    assert next(jsonl.fields(str(tmp_path / "f.jsonl"), "")) == [["text"]] * len(decoded)
    assert len(decoded) < 100


@pytest.mark.parametrize("size", [1, 60_000, 70_000, 200_000])
def test_an_object_is_found_wherever_the_steps_of_the_look_end(tmp_path: Path, size: int) -> None:
    lines = [b'{"a": "' + b"x" * size + b'"}', b"bad" * size, b'{"b": 1}', b'{"c": "' + b"x" * size + b'"}']
    write(tmp_path / "f.jsonl", lines)
    assert list(chain.from_iterable(jsonl.fields(str(tmp_path / "f.jsonl"), ""))) == [["a"], ["b"], ["c"]]


@given(bad=st.sets(st.integers(0, 19)), cuts=st.sets(st.integers(1, 399), max_size=5))
@settings(max_examples=100, deadline=None, database=None)
def test_bad_lines_are_told_once_each_wherever_the_ranges_end(
    tmp_path_factory: pytest.TempPathFactory, bad: set[int], cuts: set[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "ranges.jsonl"
    lines = [b'{"text": bad     }' if i in bad else b'{"text": "n. %04d"}' % i for i in range(20)]
    positions = write(path, lines)
    borders = [0, *sorted(cuts), -1]
    parts = [read(path, None, start, stop) for start, stop in pairwise(borders)]
    assert list(chain.from_iterable(documents for documents, _ in parts)) == [
        (positions[i], f"n. {i:04d}") for i in range(20) if i not in bad
    ]
    assert list(chain.from_iterable(skips for _, skips in parts)) == [
        (positions[i], "invalid_json") for i in sorted(bad)
    ]


@pytest.mark.parametrize("is_small", [False, True], ids=["alone", "joined"])
def test_the_values_for_a_filter_come_from_good_lines_and_from_those_that_only_arrow_accepts(
    tmp_path: Path, is_small: bool
) -> None:
    lines = [
        b'{"text": "a", "n": 1}',
        b'{"text": "b", "n": NaN}',
        b"rubbish",
        b'{"text": "c"}',
        b'{"text": "d", "n": 1e999}',
        b'{"text": "e", "n": "\xff"}',
        b'{"text": 5, "n": 1}',
        b'{"text": "f", "n": {"x": [null]}}',
    ]
    path = tmp_path / "a.jsonl"
    write(path, lines)
    source = Source(
        name="a.jsonl", kind="jsonl", compression="", bytes=path.stat().st_size,
        modified=path.stat().st_mtime_ns, split="", text={"column": "text", "filter": ["n"]},
    )  # fmt: skip
    if is_small:
        unit = Unit(index=0, source=0, num_sources=1, start=0, stop=-1, text_bytes=1)
        batches = list(read_unit(unit, [str(path)], [source], documents="lines", limit=1000))
    else:
        batches = list(JsonLinesFormat().read(SourceSlice(path=str(path), index=0, source=source), limit=1000))
    texts = [text for batch in batches for text in batch.text.to_pylist()]
    values = [found["n"] for batch in batches for found in batch.beside]
    assert texts == ["a", "b", "c", "d", "f"]
    assert [value for value in values if value == value] == [1, None, float("inf"), {"x": [None]}]
    assert [skip.reason for batch in batches for skip in batch.skips] == ["invalid_json", "invalid_json", "not_text"]
