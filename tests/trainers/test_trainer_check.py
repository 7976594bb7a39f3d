"""The checker of `make trainers` sees what it is there to see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trainer_check import Steps, Windows, check_once, check_same, cross_entropy, join, read_run
from trainer_lab import make_dataset


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    return Windows(make_dataset(tmp_path_factory.mktemp("checker")), 16)


def make_steps(windows: Windows) -> Steps:
    rows = [number % windows.count for number in range(2 * windows.count)]
    return {step: rows[step * 6 : step * 6 + 6] for step in range(len(rows) // 6)}


def test_a_sample_that_comes_twice_or_never_is_seen(windows: Windows) -> None:
    steps = make_steps(windows)
    check_once(steps, windows, batch_size=6, epochs=2, tail="continues")
    for step in range(len(steps)):
        wrong = {**steps, step: [*steps[step][:5], steps[step][0]]}
        # Where one epoch ends and the next one begins, a step may have a sample twice.
        if step != windows.count // 6:
            with pytest.raises(AssertionError):
                check_once(wrong, windows, batch_size=6, epochs=2, tail="continues")
        with pytest.raises(AssertionError, match="differs"):
            check_same(steps, wrong, epochs=2, tail="continues")


@pytest.mark.parametrize("shift", [0, 2])
def test_the_loss_of_another_token_is_seen(windows: Windows, tmp_path: Path, shift: int) -> None:
    inputs = np.stack([windows.tokens[number * 16 :][:16] for number in (3, 5)])
    logits = np.random.default_rng(1).normal(size=(2, 16, 257)).astype(np.float32)
    for name, distance in (("right", 1), ("wrong", shift)):
        labels = np.stack([windows.tokens[number * 16 + distance :][:16] for number in (3, 5)])
        (tmp_path / name).mkdir()
        loss = cross_entropy(logits, labels)
        np.savez(tmp_path / name / "00000-0.npz", inputs=inputs, logits=logits, loss=loss, num_targets=16)
    assert read_run(tmp_path / "right", windows, 1).steps == {0: [3, 5]}
    with pytest.raises(AssertionError, match="by hand"):
        read_run(tmp_path / "wrong", windows, 1)


def test_a_resume_that_leaves_out_a_step_is_seen(windows: Windows, tmp_path: Path) -> None:
    steps = make_steps(windows)
    whole = type("Run", (), {"steps": {step: steps[step] for step in range(10)}})
    late = type("Run", (), {"steps": {step: rows for step, rows in steps.items() if step > 10}})
    with pytest.raises(AssertionError, match="resumed at step 11"):
        join(whole, late)
