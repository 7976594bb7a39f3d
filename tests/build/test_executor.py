"""A look before the work that is shared out over workers."""

from __future__ import annotations

from tokenmill.build.executor import Checked, Estimate, Request, divided, joined
from tokenmill.build.task import Task
from tokenmill.planning import Unit

TASKS = tuple(
    Task(unit=Unit(index=index, source=0, num_sources=0, start=0, stop=10, text_bytes=10), sources=())
    for index in range(5)
)


def checked(tokens: int, error: int, documents: int, unread: tuple[int, ...] = ()) -> Checked:
    estimate = Estimate(tokens=tokens, error=error, documents=documents, output_bytes=2 * tokens, seconds=1.0)
    parity = {"reference": "tiktoken", "documents": documents, "bytes": 10 * documents, "tokens": 3 * documents}
    return Checked(parity=parity, estimate=estimate, unread=unread)


def test_every_task_is_in_one_part() -> None:
    request = Request(tasks=TASKS, bytes_each=100, total_bytes=1000)
    for parts in (1, 2, 3, 5, 9):
        found = divided(request, parts)
        assert len(found) == min(parts, 5)
        assert sorted(task.unit.index for part in found for task in part.tasks) == [0, 1, 2, 3, 4]
        assert {(part.bytes_each, part.total_bytes) for part in found} == {(100, 1000)}


def test_parities_add_up_and_estimates_of_the_whole_are_averaged() -> None:
    whole = joined([checked(100, 30, 4, (7,)), checked(200, 40, 2, (3,))])
    assert whole.parity == {"reference": "tiktoken", "documents": 6, "bytes": 60, "tokens": 18}
    assert whole.estimate == Estimate(tokens=150, error=25, documents=3, output_bytes=300, seconds=1.0)
    assert whole.unread == (3, 7)


def test_who_saw_no_text_has_no_say_in_the_estimate() -> None:
    seen = checked(100, 30, 4)
    assert joined([checked(0, 0, 0), seen]).estimate == seen.estimate
    nothing = checked(0, 0, 0)
    assert joined([nothing, nothing]).estimate == nothing.estimate
