"""Units as tasks of a real Ray cluster of two nodes on this machine: the same bytes, whoever is lost."""

from __future__ import annotations

import ast
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_lab import OPTIONS, RECIPE, halting_command, wait_for

import tokenmill as library
from conftest import Command, make_texts, tree, write_parquet
from nodes import add_node, kill_node, ray_cluster, unit_processes
from tokenmill.errors import BuildError, RecipeError
from tokenmill.executors.forkserver import WORKER_ENVIRONMENT

ray = pytest.importorskip("ray")
from tokenmill.executors.ray import SPARE_ACTORS, num_actors

pytestmark = [
    pytest.mark.usefixtures("all_slots"),
    pytest.mark.xdist_group("ray"),  # one process, so that one cluster is started
]


@pytest.fixture
def whole(corpus: Path, tmp_path: Path, halting: tuple[Path, Path]) -> dict[str, str]:
    """The right bytes, where a build comes to a halt."""
    go, _ = halting
    go.touch()
    library.prepare(str(corpus), tmp_path / "right", workers=1, filter="halting:keep", **RECIPE)
    go.unlink()
    return tree(tmp_path / "right")


@contextlib.contextmanager
def building(cluster: Any, corpus: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, at a moment when some of its units are done; it comes to a halt before all are."""
    arguments = halting_command(cluster, corpus, out)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: num_receipts(out) >= 3 or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def num_receipts(out: Path) -> int:
    return len(list((out / ".build/receipts").glob("*.json"))) if (out / ".build/receipts").is_dir() else 0


def test_a_cluster_gives_the_bytes_of_the_local_pool(
    cluster: Any, corpus: Path, tmp_path: Path, right: dict[str, str]
) -> None:
    events: list[dict[str, Any]] = []
    out = tmp_path / "out"
    result = library.prepare(
        str(corpus), out, executor="ray", ray_address=cluster.address, watch=events.append, **RECIPE
    )
    assert tree(out) == right
    assert not ray.is_initialized(), "what was joined is left"
    done = [event["unit"] for event in events if event["kind"] == "done"]
    assert sorted(done) == list(range(len(done)))
    last = [event for event in events if event["kind"] == "progress"][-1]
    assert (last["workers"], last["tokens"]) == (2, result.manifest.tokens)


def test_a_program_that_has_joined_a_cluster_stays_in_it_and_gets_its_slots_back(
    cluster: Any, corpus: Path, tmp_path: Path, right: dict[str, str]
) -> None:
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        library.prepare(str(corpus), tmp_path / "out", executor="ray", **RECIPE)
        wait_for(lambda: ray.available_resources().get("CPU") == 2)
    finally:
        ray.shutdown()
    assert tree(tmp_path / "out") == right


def test_a_filter_and_a_budget_go_along(cluster: Any, corpus: Path, tmp_path: Path, tokenmill: Command) -> None:
    (tmp_path / "mine.py").write_text("def keep(text):\n    return 'mill' in text\n")
    extra = ("--filter", "mine:keep", "--max-tokens", "20000", "--scratch", tmp_path / "fast")
    tokenmill(
        "prepare", corpus, "-o", "there", *OPTIONS, "--ray-address", cluster.address, *extra, PYTHONPATH=str(tmp_path)
    )
    tokenmill("prepare", corpus, "-o", "here", *OPTIONS[:-2], *extra, PYTHONPATH=str(tmp_path))
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


def test_no_variable_of_the_driver_goes_to_the_nodes(
    cluster: Any, corpus: Path, tmp_path: Path, tokenmill: Command
) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "spy.py").write_text(
        f"import os\n\ndef keep(text):\n    open({str(seen)!r}, 'w').write(repr(dict(os.environ)))\n    return True\n"
    )
    options = (*OPTIONS, "--filter", "spy:keep", "--ray-address", cluster.address)
    secrets = {"AWS_SECRET_ACCESS_KEY": "not-for-others-1", "HF_TOKEN": "not-for-others-2"}
    tokenmill("prepare", corpus, "-o", "out", *options, PYTHONPATH=str(tmp_path), **secrets)
    assert WORKER_ENVIRONMENT.items() <= ast.literal_eval(seen.read_text()).items()
    assert "not-for-others" not in seen.read_text()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        jobs = str(ray._private.state.jobs())
    finally:
        ray.shutdown()
    assert "spy:keep" in jobs, "Ray shows the command line"
    assert "not-for-others" not in jobs


def test_a_worker_and_then_a_driver_that_are_killed_cost_what_was_in_flight(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path], whole: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with building(cluster, corpus, out) as process:
        busy: list[int] = []
        wait_for(lambda: bool(busy.extend(unit_processes()) or busy))
        os.kill(busy[0], signal.SIGKILL)
        before = num_receipts(out)
        wait_for(lambda: num_receipts(out) > before + 3)
        assert process.poll() is None, "the driver goes on, and is killed in the midst of it"
        process.kill()
        process.wait()
    kept = {file.name: file.stat().st_mtime_ns for file in (out / ".build/receipts").glob("*.json")}
    halting[0].touch()
    subprocess.run(halting_command(cluster, corpus, out), check=True)
    assert tree(out) == whole
    assert {name: (out / ".build/receipts" / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_on_the_driver_stops_the_remote_tasks(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path], stop: signal.Signals
) -> None:
    with building(cluster, corpus, tmp_path / "out") as process:
        process.send_signal(stop)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "are saved" in said
    wait_for(lambda: not unit_processes())
    assert not (tmp_path / "out/dataset.json").exists()


def test_a_node_that_is_lost_costs_what_was_in_flight(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path], whole: dict[str, str]
) -> None:
    lost = add_node(cluster)
    with building(cluster, corpus, tmp_path / "out") as process:
        cluster.remove_node(lost, allow_graceful=False)
        halting[0].touch()
        printed, said = process.communicate(timeout=300)
        assert (process.returncode, printed) == (0, ""), said
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("placement", ["shared", "node-local"])
def test_a_head_that_is_lost_ends_the_driver_with_a_sentence_and_another_cluster_goes_on(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path], whole: dict[str, str], placement: str
) -> None:
    go, halted = halting
    out, hasty = tmp_path / "out", "from tokenmill.executors import ray_cluster; ray_cluster.LOST_SECONDS = 3.0; "

    def arguments(cluster: Any) -> list[str]:
        words = [*halting_command(cluster, corpus, out), "--placement", placement]
        return [hasty + word if words[at - 1] == "-c" else word for at, word in enumerate(words)]

    with ray_cluster(nodes=0, head_slots=2) as short_lived:
        process = subprocess.Popen(arguments(short_lived), stderr=subprocess.PIPE, text=True)
        wait_for(lambda: halted.exists() or process.poll() is not None)
        kill_node(short_lived.head_node)
        _, said = process.communicate(timeout=50)  # Ray would end it after 60 s, with words of its own
    assert process.returncode == 1
    assert said.splitlines() == [
        "error: the head of the Ray cluster was lost: it does not answer",
        "hint: restart the cluster, then run the same command to resume",
    ]
    go.touch()
    if placement == "shared":
        kept = {file: file.stat().st_mtime_ns for file in (out / ".build/receipts").glob("*.json")}
        subprocess.run(arguments(cluster), check=True)
        assert tree(out) == whole
        assert {file: file.stat().st_mtime_ns for file in kept} == kept


def test_a_broken_source_fails_its_units_after_the_others_are_done(cluster: Any, corpus: Path, tmp_path: Path) -> None:
    bad = write_parquet(corpus / "d.parquet", make_texts(300, seed=9))
    data = bytearray(bad.read_bytes())
    data[100:400] = bytes(300)
    bad.write_bytes(data)
    events: list[dict[str, Any]] = []
    with pytest.raises(BuildError, match="the others are done") as caught:
        library.prepare(
            str(corpus), tmp_path / "out", executor="ray", ray_address=cluster.address, watch=events.append, **RECIPE
        )
    assert re.search(rf"d\.parquet from .*: {platform.node()}: ", caught.value.message)
    total = next(event["total_units"] for event in events if event["kind"] == "start")
    failed = {event["unit"] for event in events if event["kind"] == "failed"}
    assert failed
    assert num_receipts(tmp_path / "out") == total - len(failed)


def test_a_unit_that_kills_its_bench_fails_and_takes_no_other_along(
    cluster: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\n\ndef keep(text):\n    if text == 'DIE':\n        os.kill(os.getpid(), 9)\n    return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (corpus / "a0.txt").write_text("in the midst of the others\nDIE\n")
    options = {**RECIPE, "filter": "deadly:keep", "executor": "ray", "ray_address": cluster.address}
    for slots in (1, 2):
        out = tmp_path / f"out{slots}"
        events: list[dict[str, Any]] = []
        where = f"{platform.node()}: a worker was lost"
        with pytest.raises(BuildError, match=rf"1 of [0-9]+ units failed.*\n.*: {where}"):
            library.prepare(str(corpus), out, workers=slots, watch=events.append, **options)
        total = next(event["total_units"] for event in events if event["kind"] == "start")
        assert num_receipts(out) == total - 1
        tried = [event["error"] for event in events if event["kind"] == "retry"]
        assert tried
        assert all(message.startswith(where) for message in tried)


def test_a_node_that_cannot_run_tokenmill_stops_the_build_and_says_why(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenmill.py").write_text("raise ImportError('not the one that you want')\n")
    lame = add_node(cluster, env_vars={"PYTHONPATH": str(tmp_path / "other")})
    options = {**RECIPE, "filter": "halting:keep", "executor": "ray", "ray_address": cluster.address}
    try:
        with pytest.raises(
            RecipeError, match=r"the node at 127.0.0.1 cannot run tokenmill: .*not the one that you want"
        ) as caught:
            library.prepare(str(corpus), tmp_path / "out", **options)
        assert "on every node" in str(caught.value.hint)
    finally:
        cluster.remove_node(lame)


def test_without_ray_the_error_says_what_to_install(corpus: Path, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["ray"] = None
import tokenmill
try:
    tokenmill.prepare({str(corpus)!r}, {str(tmp_path / "out")!r}, executor="ray")
except tokenmill.TokenmillError as error:
    print(error.message, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Ray is not installed pip install 'tokenmill[ray]', on every node\n"
    assert not (tmp_path / "out").exists()


def test_benches_are_spare_only_where_all_slots_are_wanted() -> None:
    assert [num_actors(wanted, 8) for wanted in (None, 3, 8, 20, 0)] == [16, 3, 16, 16, 6]
    assert num_actors(None, 1000) == 1000 + SPARE_ACTORS
