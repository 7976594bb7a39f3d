"""Units as tasks of a real Ray cluster of two nodes on this machine: the same bytes, whoever is lost."""

from __future__ import annotations

import ast
import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as library
from conftest import Command, command, make_texts, tree, write_parquet
from nodes import add_node, kill_node, listening, ray_cluster, unit_processes
from tokenmill.errors import BuildError, RecipeError
from tokenmill.executors.forkserver import WORKER_ENVIRONMENT

ray = pytest.importorskip("ray")
from tokenmill.executors.ray import (
    SPARE_ACTORS,
    num_actors,
)
from tokenmill.executors.ray_cluster import (
    find_cluster,
    num_slots,
)

pytestmark = pytest.mark.xdist_group("ray")  # one process, so that one cluster is started

RECIPE: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "4kB", "split": "val=0.1"}
OPTIONS = ("--tokenizer", "byte", "--unit-bytes", "4kB", "--split", "val=0.1", "-q", "--executor", "ray")
# A filter that comes to a halt at one document, and says so, until it may go on.
HALT = """
import os, time

def keep(text):
    while "HALT" in text and not os.path.exists({go!r}):
        open({halted!r}, "w").close()
        time.sleep(0.01)
    return True
"""


@pytest.fixture(autouse=True)
def all_slots(one_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many units at once as the cluster has slots."""
    monkeypatch.delenv("DATASET_NUM_PROC")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one slot each."""
    with ray_cluster(nodes=1, head_slots=1) as made:
        yield made


@pytest.fixture
def right(corpus: Path, tmp_path: Path) -> dict[str, str]:
    library.prepare(str(corpus), tmp_path / "right", workers=1, **RECIPE)
    return tree(tmp_path / "right")


@pytest.fixture
def halting(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A last source where a build comes to a halt: it makes the second file, and goes on once there is the first."""
    go, halted = tmp_path / "go", tmp_path / "halted"
    (tmp_path / "halting.py").write_text(HALT.format(go=str(go), halted=str(halted)))
    monkeypatch.delitem(sys.modules, "halting", raising=False)  # that of another test
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NODE", "driver")
    (corpus / "d.txt").write_text("the last unit\nHALT\n")
    return go, halted


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


def halting_command(cluster: Any, corpus: Path, out: object) -> list[str]:
    # The path of modules is the driver's alone: nodes that are started meanwhile outlive this test.
    options = (*OPTIONS, "--filter", "halting:keep", "--ray-address", cluster.address)
    return ["env", f"PYTHONPATH={corpus.parent}", *command("prepare", corpus, "-o", out, *options)]


def num_receipts(out: Path) -> int:
    return len(list((out / ".build/receipts").glob("*.json"))) if (out / ".build/receipts").is_dir() else 0


def wait_for(is_so: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


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
        "hint: start the cluster again, then run the same command: what is done is kept",
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


LOCAL: dict[str, Any] = {"executor": "ray", "placement": "node-local"}


def test_every_node_keeps_a_part_and_one_that_was_lost_goes_on_with_its_own(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path]
) -> None:
    (go, halted), parts = halting, [tmp_path / f"node{n}/out" for n in range(2)]
    recipe = {**RECIPE, "filter": "halting:keep"}
    events: list[dict[str, Any]] = []

    def prepare() -> Any:
        place = f"{tmp_path}/$NODE/out"
        return library.prepare(str(corpus), place, ray_address=cluster.address, watch=events.append, **LOCAL, **recipe)

    def lose_a_node() -> None:
        wait_for(halted.exists)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    loser = threading.Thread(target=lose_a_node, daemon=True)
    loser.start()
    with pytest.raises(BuildError, match=r"1 of 2 parts failed, the others are done:\n.*node1/out: the node was lost"):
        prepare()
    loser.join()
    kept = {file: file.stat().st_mtime_ns for part in parts for file in (part / ".build/receipts").glob("*.json")}
    add_node(cluster, env_vars={"NODE": "node1"})
    go.touch()
    result = prepare()

    plain = library.prepare(str(corpus), tmp_path / "right", workers=1, **recipe).manifest
    whole = result.manifest
    assert (whole.fingerprint, whole.text_sum, whole.dropped) == (plain.fingerprint, plain.text_sum, plain.dropped)
    assert list(whole.sources) == list(plain.sources)
    opened = [library.open(part)["train"] for part in parts]
    tokens = np.concatenate([train.tokens(0, train.num_tokens) for train in opened])
    assert (tokens == library.open(tmp_path / "right")["train"].tokens(0, len(tokens))).all()
    assert whole.splits["train"].tokens == plain.splits["train"].tokens == len(tokens)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert [place.path for place in result.nodes.parts] == [str(part) for part in parts]
    assert len({(place / "nodes.json").read_bytes() for place in (*parts, tmp_path / "driver/out")}) == 1
    last = [event for event in events if event["kind"] == "progress"][-1]
    assert (last["units"], last["bytes"]) == (last["total_units"], last["total_bytes"])


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("$ONLY_HERE/out", "the variable ONLY_HERE, which .ONLY_HERE/out needs, is not set on {here}"),
        ("${NOWHERE}/out", "the variable NOWHERE, which .* needs, is not set on {here}"),
        ("$EMPTY/out", "the variable EMPTY, which .* needs, is not set on {here}"),
        ("$(hostname)/out", "is .* on {here}"),
        ("~nobody-of-this-name/out", "no user of {here} has the home"),
        ("$RELATIVE/out", "is some/out on {here}"),
        ("~/out", "two nodes on {here} would both write to "),
    ],
)
def test_a_place_that_means_nothing_on_a_node_is_refused(
    cluster: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    for name, value in {"ONLY_HERE": str(tmp_path), "EMPTY": "", "RELATIVE": "some"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=said.format(here=platform.node())):
        library.prepare(str(corpus), output, ray_address=cluster.address, **LOCAL, **RECIPE)


def test_ctrl_c_on_the_driver_stops_the_parts_of_the_nodes(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path]
) -> None:
    go, halted = halting
    arguments = [*halting_command(cluster, corpus, f"{tmp_path}/$NODE/out"), "--placement", "node-local"]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: halted.exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "What the nodes have done is saved" in said
    wait_for(lambda: not unit_processes("build_part"))
    assert not list(tmp_path.glob("*/out/nodes.json"))
    go.touch()
    assert subprocess.run(arguments).returncode == 0
    assert len(list(tmp_path.glob("*/out/nodes.json"))) == 3


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment where no cluster is found, with a home where nothing is; that home."""
    place = tempfile.mkdtemp(prefix="r")  # names of sockets must be short
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", place)
    monkeypatch.setenv("HOME", str(home))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    yield home
    shutil.rmtree(place, ignore_errors=True)


def test_without_a_cluster_a_local_ray_is_started_and_stopped(
    corpus: Path, tmp_path: Path, right: dict[str, str], alone: Path
) -> None:
    assert find_cluster(None) is None
    done = subprocess.run(
        command("prepare", corpus, "-o", tmp_path / "out", *OPTIONS, "-j", 2), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert tree(tmp_path / "out") == right
    assert not (alone / ".ray").exists(), "no secret for the Ray programs to come"


def test_a_local_ray_listens_on_the_loopback_alone_and_leaves_no_secret_in_its_program(alone: Path) -> None:
    """Twice in one program: the second one has a secret of its own."""
    code = """
import os
from tokenmill.executors.ray_cluster import connect, leave, ray

before = dict(os.environ)
for _ in range(2):
    connect(None, 1)
    ray.get(ray.remote(lambda: 0).remote())
    print({name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}, flush=True)
    input()
    leave()
print(ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.DISABLED)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "set()\n"
        found = listening(process.pid)
        assert len(found) >= 5, "its head, its node, its agent, a worker and the program"
        assert set(found) == {"127.0.0.1"}
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.communicate() == ("True\n", "")
    assert not (alone / ".ray").exists()


def test_a_local_ray_that_does_not_start_leaves_no_secret_either(alone: Path, tmp_path: Path) -> None:
    code = """
import os
from tokenmill.executors.ray_cluster import connect, ray
from tokenmill.errors import BuildError

before = dict(os.environ)
try:
    connect(None, 1)
except BuildError as error:
    print(error.message)
print(dict(os.environ) == before, ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.DISABLED)
"""
    too_long = {**os.environ, "RAY_TMPDIR": str(tmp_path / ("x" * 100))}  # for the name of a socket
    done = subprocess.run([sys.executable, "-c", code], env=too_long, capture_output=True, text=True)
    assert re.fullmatch(r"Ray does not start: .*\nTrue True\n", done.stdout, re.DOTALL), done
    assert not (alone / ".ray").exists()


def test_a_cluster_of_this_machine_that_asks_for_the_users_secret_is_joined_with_it(
    corpus: Path, tmp_path: Path, right: dict[str, str], alone: Path
) -> None:
    (alone / ".ray").mkdir()
    (alone / ".ray/auth_token").write_text("5" * 64)
    options = ("--num-cpus=2", "--port=0", "--include-dashboard=false", "--disable-usage-stats", "--block")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options]
    head = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: find_cluster(None) is not None or head.poll() is not None)
        done = subprocess.run(
            command("prepare", corpus, "-o", tmp_path / "out", *OPTIONS, "--ray-address", "auto"),
            capture_output=True,
            text=True,
        )
    finally:
        head.terminate()
        head.wait()
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path / "out") == right


def test_addresses_where_no_cluster_is_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address, said in {
        "auto": "no Ray cluster is found",
        "127.0.0.1:1": "no Ray cluster answers",
        "ray://host:10001": "is no address",
        "host": "is no address",
        "host:99999999": "no Ray cluster answers",
    }.items():
        with pytest.raises(RecipeError, match=said):
            find_cluster(address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RecipeError, match="no Ray cluster answers"):
        find_cluster(None)


def test_arguments_that_make_no_sense_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'dask' is no executor"):
        library.prepare(str(corpus), tmp_path / "out", executor="dask")
    with pytest.raises(RecipeError, match="without Ray"):
        library.prepare(str(corpus), tmp_path / "out", ray_address="auto")
    with pytest.raises(RecipeError, match="'far' is no placement"):
        library.prepare(str(corpus), tmp_path / "out", placement="far")
    with pytest.raises(RecipeError, match="for the nodes of a cluster"):
        library.prepare(str(corpus), tmp_path / "out", placement="node-local")
    for extra in ({"layout": "nanogpt"}, {"scratch": tmp_path}, {"max_tokens": "1k"}, {"split": "nanogpt"}):
        with pytest.raises(RecipeError, match=f"`{next(iter(extra))}"):
            library.prepare(str(corpus), tmp_path / "out", **LOCAL, **extra)
    with pytest.raises(RecipeError, match="no place on this machine"):
        library.prepare(str(corpus), "s3://bucket/out", **LOCAL)
    assert not (tmp_path / "out").exists()


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


def test_slots_are_as_asked_and_never_more_than_there_are() -> None:
    assert [num_slots(wanted, 8) for wanted in (None, 3, 8, 20, 0, -1)] == [8, 3, 8, 8, 6, 6]
    assert num_slots(None, 0) == num_slots(-1, 1) == 1


def test_benches_are_spare_only_where_all_slots_are_wanted() -> None:
    assert [num_actors(wanted, 8) for wanted in (None, 3, 8, 20, 0)] == [16, 3, 16, 16, 6]
    assert num_actors(None, 1000) == 1000 + SPARE_ACTORS
