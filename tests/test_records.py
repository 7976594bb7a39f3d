from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill import records
from tokenmill.errors import DatasetError
from tokenmill.records import Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    size: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    title: str
    share: float
    last: bool
    note: str | None
    parts: tuple[Part, ...]
    counts: dict[str, Int]
    extra: dict[str, Any]


def make_whole(**fields: Any) -> Whole:
    known: dict[str, Any] = {
        "title": "Zwölf",
        "share": 0.5,
        "last": True,
        "note": None,
        "parts": (Part(name="a", size=1), Part(name="b", size=-1)),
        "counts": {"x": 3},
        "extra": {"deep": [1, "two", None]},
    }
    return Whole(**{**known, **fields})


def sealed(body: Any) -> bytes:
    """A record with a right seal, whatever is in it."""
    return records.seal(body)


def body_of(value: Any) -> dict[str, Any]:
    """A record as plain JSON, to be changed and sealed again."""
    return dict(json.loads(records.canonical(value)))


any_text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)


@given(
    title=any_text,
    share=st.floats(allow_nan=False, allow_infinity=False),
    sizes=st.lists(st.integers(-1, (1 << 62) - 1), max_size=4),
    extra=st.dictionaries(any_text, plain, max_size=3),
)
@settings(deadline=None, database=None)
def test_what_was_sealed_comes_back(title: str, share: float, sizes: list[int], extra: dict[str, Any]) -> None:
    parts = tuple(Part(name=str(index), size=size) for index, size in enumerate(sizes))
    whole = make_whole(title=title, share=share, parts=parts, extra=extra)
    assert records.unseal(Whole, records.seal(whole), where="f") == whole


@given(plain)
@settings(deadline=None, database=None)
def test_canonical_json_is_json_and_does_not_depend_on_the_order_of_keys(value: Any) -> None:
    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: backwards(value[key]) for key in reversed(value)}
        return [backwards(item) for item in value] if isinstance(value, list) else value

    assert json.loads(records.canonical(value)) == value
    assert records.canonical(backwards(value)) == records.canonical(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes", object()])
def test_what_is_no_json_cannot_be_canonical(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        records.canonical({"x": value})


@given(data=st.data())
@settings(max_examples=200, deadline=None, database=None)
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(records.seal(make_whole()))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DatasetError, match=r"^f"):
        records.unseal(Whole, bytes(whole), where="f")


@given(st.integers(0, 400))
@settings(deadline=None, database=None)
def test_a_truncated_record_is_noticed(size: int) -> None:
    whole = records.seal(make_whole())
    with pytest.raises(DatasetError, match=r"^f"):
        records.unseal(Whole, whole[: min(size, len(whole) - 1)], where="f")


@pytest.mark.parametrize("change", [b"", b"\n\n", b" \n", b"\r\n"])
def test_white_space_at_the_end_is_noticed(change: bytes) -> None:
    with pytest.raises(DatasetError, match="seal"):
        records.unseal(Whole, records.seal(make_whole()).removesuffix(b"\n") + change, where="f")


def test_the_same_content_in_other_bytes_is_noticed() -> None:
    body = json.loads(records.seal(make_whole()))
    backwards = json.dumps(dict(reversed(body.items())), separators=(",", ":"), ensure_ascii=False)
    for other in (json.dumps(body), backwards):
        with pytest.raises(DatasetError, match="seal"):
            records.unseal(Whole, other.encode() + b"\n", where="f")


def test_a_number_too_large_for_a_share_is_a_typed_error() -> None:
    body = body_of(make_whole())
    with pytest.raises(DatasetError, match=r"f\.share: number out of range"):
        records.unseal(Whole, sealed({**body, "share": 10**400}), where="f")


def test_a_seal_of_another_record_is_noticed() -> None:
    one, two = records.seal(make_whole()), records.seal(make_whole(title="other"))
    with pytest.raises(DatasetError, match="its seal does not match its content"):
        records.unseal(Whole, one[:-70] + two[-70:], where="f")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        b'{"x": {"a": 1, "a": 1}}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b'{"a": 1} {"b": 2}',
    ],
    ids=lambda data: repr(data[:24]),
)
def test_hostile_json_is_an_error_that_names_the_file(data: bytes) -> None:
    with pytest.raises(DatasetError, match=r"^some/file") as caught:
        records.parse(data, where="some/file")
    assert caught.value.hint


@pytest.mark.parametrize("value", [b'"\\ud83d"', b"1e999", b"-1e999", b"[1e999]", b'{"\\ud83d": 1}'])
def test_values_that_cannot_be_written_again_are_an_error_too(value: bytes) -> None:
    with pytest.raises(DatasetError, match=r"^f"):
        body = records.canonical(make_whole(extra={"x": 7})).replace(b"7", value)
        records.unseal(Whole, body[:-1] + b',"seal":"%s"}\n' % hashlib.sha256(body).hexdigest().encode(), where="f")


def test_eighteen_levels_are_not_too_deep() -> None:
    deep: Any = 7
    for _ in range(14):
        deep = [deep]
    assert records.unseal(Whole, sealed({**body_of(make_whole()), "extra": {"x": deep}}), where="f")
    with pytest.raises(DatasetError, match="18 deep"):
        records.unseal(Whole, sealed({**body_of(make_whole()), "extra": {"x": [[[deep, deep]]]}}), where="f")


@pytest.mark.parametrize("value", [[], 7, "x", None, {}, {"a": 1}])
def test_a_record_without_a_seal_is_refused(value: Any) -> None:
    with pytest.raises(DatasetError, match="not a sealed record"):
        records.unseal(Whole, records.canonical(value), where="f")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("title", 7, r"f\.title: expected str, got int"),
        ("title", None, r"f\.title: expected str, got null"),
        ("share", "x", r"f\.share: expected float, got str"),
        ("share", True, r"f\.share: expected float, got bool"),
        ("last", 1, r"f\.last: expected bool, got int"),
        ("note", 7, r"f\.note: expected str \| null, got int"),
        ("parts", {}, r"f\.parts: expected array, got object"),
        ("parts", [7], r"f\.parts\[0\]: expected object, got int"),
        ("parts", [{"name": "a", "size": True}], r"f\.parts\[0\]\.size: expected int, got bool"),
        ("parts", [{"name": "a", "size": 1.0}], r"f\.parts\[0\]\.size: expected int, got float"),
        ("parts", [{"name": "a", "size": -2}], r"f\.parts\[0\]\.size: expected int >= -1"),
        ("parts", [{"name": "a", "size": 1 << 62}], r"f\.parts\[0\]\.size: expected int <= \d+"),
        ("parts", [{"name": "a", "size": 1 << 80}], r"f\.parts\[0\]\.size: expected int <= \d+"),
        ("parts", [{"name": "a"}], r"f\.parts\[0\]: object missing required field size"),
        ("parts", [{"name": "a", "size": 1, "x": 1}], r"f\.parts\[0\]: object contains unknown field x"),
        ("counts", [], r"f\.counts: expected object, got array"),
        ("counts", {"x": "1"}, r"f\.counts\[...\]: expected int, got str"),
        ("counts", {"x": 1 << 62}, r"f\.counts\[...\]: expected int <= \d+"),
    ],
)
def test_a_sealed_record_of_wrong_types_is_an_error_that_names_the_place(field: str, value: Any, told: str) -> None:
    body = body_of(make_whole())
    with pytest.raises(DatasetError, match=told):
        records.unseal(Whole, sealed({**body, field: value}), where="f")


def test_a_missing_field_is_named_before_an_unknown_one() -> None:
    body = body_of(make_whole())
    del body["title"]
    with pytest.raises(DatasetError, match="f: object missing required field title"):
        records.unseal(Whole, sealed({**body, "tilte": "x"}), where="f")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"counts"', b'{ "counts"'),
        (b'"last":true', b'"last":true,"last":true'),
        (b'"last":true', b'"last":false,"last":true'),
        (b'{"x":3}', b'{"x":2,"x":3}'),
        (b'"size":1', b'"size":2,"size":1'),
        (b'"two"', b'"\\u0074wo"'),
        (b"0.5", b"0.50"),
        (b"0.5", b"5e-1"),
        (b'"name":"a","size":1', b'"size":1,"name":"a"'),
        (b'lf"}', b'lf" }'),
    ],
)
def test_a_sealed_record_in_another_spelling_is_refused(before: bytes, after: bytes) -> None:
    """Duplicate keys are one: the last would win."""
    body = records.canonical(make_whole())
    assert before in body
    other = body.replace(before, after, 1)
    sealed_body = other[:-1] + b',"seal":"%s"}\n' % hashlib.sha256(other[:-1] + b"}").hexdigest().encode()
    with pytest.raises(DatasetError, match="f: not canonical JSON"):
        records.unseal(Whole, sealed_body, where="f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Newer:
    title: str
    size: Int
    added: str = ""
    part: Part | None = None


def test_a_record_of_an_older_version_lacks_fields_that_have_a_default() -> None:
    assert records.unseal(Newer, sealed({"title": "t", "size": 1}), where="f") == Newer(title="t", size=1)
    with pytest.raises(DatasetError, match="f: object contains unknown field other"):
        records.unseal(Newer, sealed({"title": "t", "size": 1, "other": 1}), where="f")
    with pytest.raises(DatasetError, match="f: not canonical JSON"):
        records.unseal(Newer, seal_text('{"size":1,"size":1,"title":"t"}'), where="f")
    part = {"name": "a", "size": 1, "x": 1}
    with pytest.raises(DatasetError, match=r"f\.part: object contains unknown field x"):
        records.unseal(Newer, sealed({"title": "t", "size": 1, "part": part}), where="f")


def test_the_same_value_has_the_same_bytes_and_another_one_has_others() -> None:
    assert records.seal(make_whole(counts={"a": 1, "b": 2})) == records.seal(make_whole(counts={"b": 2, "a": 1}))
    assert records.digest(make_whole()) != records.digest(make_whole(title="other"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    rows: Sequence[Part]
    title: str


def seal_text(body: str) -> bytes:
    """Any text with a right seal."""
    seal = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]},"seal":"{seal}"}}\n'.encode()


ROW = '{"name":"a","size":1}'


@pytest.mark.parametrize("rows", ["", ROW, f"{ROW},{ROW}"])
def test_a_table_is_read_in_parts_and_a_text_that_is_not_canonical_is_refused(
    monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    monkeypatch.setattr(records, "_PART_BYTES", 1)
    part = Part(name="a", size=1)
    found = records.unseal(Listed, seal_text(f'{{"rows":[{rows}],"title":"t"}}'), where="f")
    assert found == Listed(rows=(part,) * rows.count("{"), title="t")
    for other in (
        f'{{ "rows":[{rows}],"title":"t"}}',
        f'{{"rows":[ {rows}],"title":"t"}}',
        f'{{"title":"t","rows":[{rows}]}}',
    ):
        with pytest.raises(DatasetError, match="not canonical JSON"):
            records.unseal(Listed, seal_text(other), where="f")


ROW2 = '{"name":"b","size":2}'


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f'{{"rows":[{ROW}],"rows":[{ROW}],"title":"t"}}', "duplicate keys"),
        ('{"rows":[],"title":"t","title":"t"}', "duplicate keys"),
        ('{"rows":[{"name":"a","size":1,"size":1}],"title":"t"}', "duplicate keys"),
        ('{"rows":[],"seal":"x","title":"t"}', "duplicate keys"),
        (f'{{"rows":[{ROW},],"title":"t"}}', "not valid JSON"),
        (f'{{"rows":[{ROW}"title":"t"}}', "not valid JSON"),
        (f'{{"rows":[{ROW}],1:"t"}}', "not valid JSON"),
        (f'{{"rows":[{ROW}],[]:"t"}}', "not valid JSON"),
        ('{"rows":[{"name":"a","size":NaN}],"title":"t"}', "not valid JSON"),
        ('{"rows":[{"name":"a","size":"1"}],"title":"t"}', r"f\.rows\[0\]\.size: expected int, got str"),
        (f'{{"rows":[{ROW},{ROW2},7],"title":"t"}}', r"f\.rows\[2\]: expected object, got int"),
        (f'{{"rows":[{ROW},{ROW2},{ROW[:-1]},"x":1}}],"title":"t"}}', r"f\.rows\[2\]: .* unknown field x"),
        ('{"rows":{},"title":"t"}', r"f\.rows: expected array, got object"),
        ('{"rows":7,"title":"t"}', r"f\.rows: expected array, got int"),
        ('{"rows":[]}', "f: object missing required field title"),
        ('{"rows":[],"title":"t","x":1}', "f: object contains unknown field x"),
        ("{}", "f: not valid JSON"),
    ],
)
def test_what_is_wrong_in_a_table_is_said(monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    monkeypatch.setattr(records, "_PART_BYTES", 1)
    with pytest.raises(DatasetError, match=said):
        records.unseal(Listed, seal_text(body), where="f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    lists: dict[str, Listed]
    number: Int


@pytest.mark.parametrize("part_bytes", [1, 2, 3, 7, 50])
def test_a_text_with_tables_is_read_part_by_part_wherever_a_part_ends(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(records, "_PART_BYTES", part_bytes)
    rows = tuple(Part(name="nämé },{ \u2028 \U0001f600" * number + "},{", size=10**number) for number in range(12))
    lists = {
        "": Listed(rows=(), title=""),
        "ü": Listed(rows=rows, title="t"),
        "x": Listed(rows=rows[:1], title="x" * 99),
    }
    whole = Nested(lists=lists, number=123_456_789)
    assert records.unseal(Nested, records.seal(whole), where="f") == whole


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"lists":{"a":{"rows":[],"title":"t"},"a":{"rows":[],"title":"t"}},"number":1}', "duplicate key"),
        ('{"lists":{"a":{"rows":{},"title":"t"}},"number":1}', r"f\.lists\.a\.rows: expected array, got object"),
        ('{"lists":{"a":[]},"number":1}', r"f\.lists\.a: expected object, got array"),
        ('{"lists":[],"number":1}', r"f\.lists: expected object, got array"),
        (
            f'{{"lists":{{"a":{{"rows":[{ROW},{{}}],"title":"t"}}}},"number":1}}',
            r"f\.lists\.a\.rows\[1\]: object missing",
        ),
        ('{"lists":{},"number":1}}', "not valid JSON"),
    ],
)
def test_what_is_wrong_in_or_around_a_table_further_inside_is_said(
    monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    monkeypatch.setattr(records, "_PART_BYTES", 1)
    with pytest.raises(DatasetError, match=said):
        records.unseal(Nested, seal_text(body), where="f")
