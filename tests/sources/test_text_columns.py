from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tokenmill.errors import RecipeError
from tokenmill.sources.base import Rule
from tokenmill.sources.text_columns import (
    columns_to_read,
    common_rule,
    filter_columns,
    find_rule,
    row_text,
    rule_columns,
    table_batch,
    unseen_rule,
    with_filter_columns,
)


def rule_of(*columns: str) -> Rule:
    return find_rule(columns, text_column=None, template=None, where="file.parquet")


def text_of(row: dict[str, Any]) -> str:
    text, reason = row_text(rule_of(*row), row)
    assert reason == ""
    return text


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "T"}, "T"),
        ({"input": "I", "output": "O"}, "I\n\nO"),
        ({"instruction": "A", "input": "I", "output": "O"}, "A\n\nI\n\nO"),
        ({"instruction": "A", "output": "O"}, "A\n\nO"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, "Hi\n\nHo"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, "Hi\n\nHo"),
        ({"prompt": "P", "response": "R"}, "P\n\nR"),
        ({"question": "Q", "answer": "A"}, "Q\n\nA"),
        ({"prompt": "P", "completion": "C"}, "P\n\nC"),
        ({"query": "Q", "response": "R"}, "Q\n\nR"),
        ({"chosen": "C", "rejected": "R"}, "C"),
        ({"chosen": "Human: P\n\nAssistant: C", "rejected": "R"}, "Human: P\n\nAssistant: C"),
        ({"prompt": "P", "chosen": "C", "rejected": "R"}, "P\n\nC"),
        ({"system": "S", "question": "Q", "chosen": "C", "rejected": "R"}, "Q\n\nC"),
        ({"prompt": "P", "chosen": [{"content": "P"}, {"content": "C"}], "rejected": []}, "P\n\nC"),
        ({"prompt": [{"content": "P"}], "chosen": [{"content": "C"}], "rejected": []}, "P\n\nC"),
        ({"prompt": "P", "response": "R", "chosen": "C", "rejected": "D"}, "P\n\nR"),
    ],
)
def test_every_known_shape_is_recognised_and_its_parts_joined_by_a_blank_line(row: dict[str, Any], text: str) -> None:
    assert text_of(row) == text


@pytest.mark.parametrize("row", [{"text": "T"}, {"question": "Q", "answer": "A"}])
def test_other_columns_do_not_hide_a_shape(row: dict[str, Any]) -> None:
    assert rule_of("id", "url", *row) == rule_of(*row)


def test_shapes_are_tried_in_order() -> None:
    shapes: list[tuple[tuple[str, ...], Rule]] = [
        (("text",), {"column": "text"}),
        (("input", "output"), {"join": ["input", "output"]}),
        (("messages",), {"turns": "messages"}),
        (("conversations",), {"turns": "conversations"}),
        (("prompt", "response"), {"join": ["prompt", "response"]}),
        (("question", "answer"), {"join": ["question", "answer"]}),
        (("prompt", "completion"), {"join": ["prompt", "completion"]}),
    ]
    for first in range(len(shapes)):
        columns = {name for names, _ in shapes[first:] for name in names}
        assert rule_of(*columns) == shapes[first][1]


def test_an_instruction_is_not_lost_where_input_and_output_stand_beside_it() -> None:
    assert rule_columns(rule_of("output", "input", "instruction")) == ["instruction", "input", "output"]


def test_text_comes_before_an_instruction() -> None:
    assert rule_of("instruction", "input", "output", "text") == {"column": "text"}


def test_an_instruction_and_its_output_come_before_messages() -> None:
    assert rule_columns(rule_of("messages", "instruction", "output")) == ["instruction", "output"]


@pytest.mark.parametrize(
    ("first", "later", "text"),
    [
        ({"instruction": "A", "output": "O"}, {"instruction": "A", "input": "I", "output": "O"}, "A\n\nI\n\nO"),
        ({"input": "I", "output": "O"}, {"instruction": "A", "input": "I", "output": "O"}, "A\n\nI\n\nO"),
        ({"instruction": "A", "input": "I", "output": "O"}, {"instruction": "A", "output": "O"}, "A\n\nO"),
    ],
)
def test_what_one_object_lacks_is_not_lost_from_another(
    first: dict[str, Any], later: dict[str, Any], text: str
) -> None:
    rule = common_rule([first], text_column=None, template=None)
    assert rule is not None
    assert row_text(rule, first) == ("\n\n".join(first.values()), "")
    assert row_text(rule, later) == (text, "")


@pytest.mark.parametrize("odd", [{"url": "u"}, {}, {"text": "T"}, {"messages": []}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_shape_of_most_objects_decides_wherever_an_odd_one_stands(odd: dict[str, Any], place: int) -> None:
    objects: list[dict[str, Any]] = [{"question": "Q", "answer": "A"}] * 2
    objects.insert(place, odd)
    assert common_rule(objects, text_column=None, template=None) == {"join": ["question", "answer"]}


def test_objects_none_of_which_has_a_shape_of_its_own_have_no_rule() -> None:
    assert common_rule([], text_column=None, template=None) is None
    assert common_rule([{"question": "Q"}, {"answer": "A"}], text_column=None, template=None) is None


def test_what_was_asked_for_need_be_in_one_object() -> None:
    objects = [{"text": "T"}, {"a": "A"}, {"a": "A", "b": "B"}]
    assert common_rule(objects, text_column="a", template=None) == {"column": "a"}
    assert common_rule(objects, text_column=None, template="{a}{b}") == {"template": "{a}{b}"}
    assert common_rule(objects[:2], text_column="b", template=None) is None
    assert common_rule(objects[:2], text_column=None, template="{text}{a}") is None


def test_the_rule_of_a_table_has_no_column_that_is_not_there() -> None:
    assert rule_of("instruction", "output") == {"join": ["instruction", "output"]}
    assert rule_of("input", "output") == {"join": ["input", "output"]}


@pytest.mark.parametrize("missing", [{"input": None}, {"input": ""}, {}])
def test_the_input_of_an_instruction_may_be_null_empty_or_missing(missing: dict[str, Any]) -> None:
    rule = rule_of("instruction", "input", "output")
    assert row_text(rule, {"instruction": "A", "output": "O", **missing}) == ("A\n\nO", "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": None, "input": "I", "output": "O"}, "null_text"),
        ({"input": "I", "output": "O"}, "missing_field"),
        ({"instruction": "A", "input": 7, "output": "O"}, "not_text"),
        ({"instruction": "A", "input": "I", "output": ["O"]}, "not_text"),
        ({"instruction": "A", "input": "I", "output": None}, "null_text"),
    ],
)
def test_a_part_that_must_be_there_and_is_not_text_makes_the_row_bad(row: dict[str, Any], reason: str) -> None:
    assert row_text(rule_of("instruction", "input", "output"), row) == ("", reason)


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([], ""),
        (["Hi", "Ho"], "Hi\n\nHo"),
        ([{"role": "user", "content": ""}, {"role": "assistant", "content": "Ho"}], "Ho"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "Ho"}]}], "Hi\n\nHo"),
        ([{"role": "user", "content": None}, {"role": "assistant", "content": "Ho"}], "Ho"),
        ([{"role": "system", "text": "Hi"}], "Hi"),
    ],
)
def test_turns_may_be_strings_or_hold_their_text_as_parts(turns: list[Any], text: str) -> None:
    assert row_text({"turns": "messages"}, {"messages": turns}) == (text, "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "null_text"),
        ({"other": 1}, "missing_field"),
        ({"messages": "Hi"}, "not_text"),
        ({"messages": [7]}, "not_text"),
        ({"messages": [{"role": "user", "content": 7}]}, "not_text"),
        ({"messages": [{"role": "user", "content": ["Hi", 7]}]}, "not_text"),
    ],
)
def test_turns_that_are_not_text_make_the_row_bad(row: dict[str, Any], reason: str) -> None:
    assert row_text({"turns": "messages"}, row) == ("", reason)


@pytest.mark.parametrize("columns", [("title", "body"), ("input",), ("prompt",), ("question", "response")])
def test_an_unknown_shape_is_an_error_that_lists_the_columns(columns: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        rule_of(*columns)
    assert "file.parquet" in caught.value.message
    assert ", ".join(sorted(columns)) in caught.value.message
    assert "`text_column" in caught.value.hint


def test_a_source_that_shows_no_columns_is_taken_to_hold_what_was_asked_for() -> None:
    assert unseen_rule(text_column=None, template=None) == {"column": "text"}
    assert unseen_rule(text_column="body", template=None) == {"column": "body"}
    assert unseen_rule(text_column=None, template="{a}") == {"template": "{a}"}


def test_a_named_column_wins_over_every_shape() -> None:
    rule = find_rule(["text", "body"], text_column="body", template=None, where="f")
    assert row_text(rule, {"text": "T", "body": "B"}) == ("B", "")


def test_a_template_wins_over_every_shape_and_keeps_its_own_text() -> None:
    rule = find_rule(["text", "a", "b"], text_column=None, template="{b}: {{{a}}}\n{b}", where="f")
    assert rule_columns(rule) == ["b", "a"]
    assert row_text(rule, {"a": "A", "b": "{a}"}) == ("{a}: {A}\n{a}", "")


def test_a_template_writes_numbers_as_they_are() -> None:
    assert row_text({"template": "{n}. {t}"}, {"n": 7, "t": "x"}) == ("7. x", "")


@pytest.mark.parametrize(("row", "reason"), [({"a": None, "b": "B"}, "null_text"), ({"b": "B"}, "missing_field")])
def test_a_template_needs_all_its_columns_in_a_row(row: dict[str, Any], reason: str) -> None:
    assert row_text({"template": "{a} {b}"}, row) == ("", reason)


@pytest.mark.parametrize(("text_column", "template"), [("nope", None), (None, "{text} {nope}")])
def test_a_column_that_is_not_there_is_an_error_that_lists_the_columns(
    text_column: str | None, template: str | None
) -> None:
    with pytest.raises(RecipeError, match=r"f has no column 'nope'; its columns: text, url"):
        find_rule(["url", "text"], text_column=text_column, template=template, where="f")


@pytest.mark.parametrize(
    "template", ["no braces", "{", "}", "{}", "{0.a}", "{a.b}", "{a[0]}", "{a!r}", "{a:>10}", "{a:}}"]
)
def test_a_template_may_hold_names_in_braces_and_nothing_else(template: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find_rule(["a", "0"], text_column=None, template=template, where="f")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"text": 7}, "not_text"), ({"text": ["x"]}, "not_text"), ({"text": None}, "null_text"), ({}, "missing_field")],
)
def test_a_column_that_is_not_text_makes_the_row_bad(row: dict[str, Any], reason: str) -> None:
    assert row_text({"column": "text"}, row) == ("", reason)


def test_the_columns_of_a_filter_are_read_beside_those_of_the_text_once_each() -> None:
    rule = with_filter_columns({"template": "{title}"}, ["url", "title"], ["url", "title"], where="file.parquet")
    assert (rule_columns(rule), filter_columns(rule)) == (["title"], ["url", "title"])
    assert columns_to_read(rule) == ["title", "url"]


def test_names_of_columns_are_read_until_all_that_a_filter_asks_for_have_been_seen() -> None:
    names = iter(["text", "url", "other"])
    with_filter_columns({"column": "text"}, ["url"], names, where="file.jsonl")
    assert list(names) == ["other"]


def test_a_source_without_any_column_lacks_none() -> None:
    assert with_filter_columns({"column": "text"}, ["url"], [], where="a")["filter"] == ["url"]


def test_the_values_for_a_filter_are_those_of_the_rows_that_are_kept() -> None:
    bad = pa.array([b"x", b"\xff", b"y", b"z"], pa.binary()).view(pa.string())
    table = pa.RecordBatch.from_pydict({"text": ["a", "b", None, "d"], "url": bad, "score": [1.0, 2.0, 3.0, None]})
    batch = table_batch(0, table, {"column": "text", "filter": ["url", "score"]}, 100)
    assert batch.text.to_pylist() == ["a", "d"]
    assert batch.beside == ({"url": "x", "score": 1.0}, {"url": "z", "score": None})
    assert [(skip.position, skip.reason) for skip in batch.skips] == [(101, "invalid_utf8"), (102, "null_text")]
