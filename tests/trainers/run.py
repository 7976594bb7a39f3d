"""Real training in each framework, on two ranks, killed, and resumed on one and on three; one table.

make trainers [ARGS="torch lightning"]

Each framework has an environment of its own under .venv-trainers. The training scripts are beside this file. What they
record is compared with a computation from the token files in numpy: every sample exactly once in each epoch, the next
token as its label, the loss as the cross-entropy of the recorded logits, to six digits, and the samples of each step
as in the undisturbed run. Exit code 1 if anything differs, or an environment cannot be made.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from trainer_check import Tail
from trainer_lab import Outcome, make_dataset, prove

from conftest import make_texts, write_parquet

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-trainers"
# First, and alone: with other packages, pip may take a build of torch for GPUs.
TORCH = "torch==2.13.0"
ENVIRONMENTS = {
    "torch": (TORCH, "torchdata"),
    "lightning": (TORCH, "lightning"),
    "lightning-2.5": (TORCH, "lightning==2.5.*"),
    "pytorch-lightning": (TORCH, "pytorch_lightning"),
    "transformers": (TORCH, "transformers", "accelerate"),
    "torchtitan": (TORCH, "torchtitan"),
    "grain": ("jax", "grain"),
    "megatron": (TORCH, "numpy", "megatron-core"),
}
TAILS = {
    "continues": "continues with the next one",
    "repeats": "fills the step with samples of this one",
    "drops": "drops the rest",
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training script, and what it runs with."""

    what: str
    script: str
    needs: str
    tail: Tail = "continues"
    resume_on: Sequence[int] = (1, 3)
    epochs: int = 2
    stop_at: int = 25
    documents: int = 48
    environment: dict[str, str] = field(default_factory=dict)
    # A page whose Python runs here, because the packages are not in the test group.
    page: str = ""


SUBJECTS = {
    "torch": Subject(what="tokenmill.torch.DataLoader", script="train_torch.py", needs="torch"),
    "torch-workers": Subject(
        what="IterableDataset in torch's DataLoader, 2 workers", script="train_workers.py", needs="torch"
    ),
    "torchdata": Subject(
        what="IterableDataset in StatefulDataLoader, 2 workers",
        script="train_stateful.py",
        needs="torch",
        resume_on=(2,),  # its states belong to one number of ranks and workers
    ),
    "lightning": Subject(
        what="tokenmill.lightning.DataModule", script="train_lightning.py", needs="lightning", tail="drops"
    ),
    "lightning-2.5": Subject(
        what="the same, in the oldest supported release",
        script="train_lightning.py",
        needs="lightning-2.5",
        tail="drops",
    ),
    "pytorch-lightning": Subject(
        what="the same, without the package lightning",
        script="train_lightning.py",
        needs="pytorch-lightning",
        tail="drops",
    ),
    "transformers": Subject(
        what="Trainer, its own order", script="train_transformers.py", needs="transformers", tail="repeats"
    ),
    "transformers-ours": Subject(
        what="Trainer, tokenmill's order",
        script="train_transformers.py",
        needs="transformers",
        tail="repeats",
        environment={"ORDER": "shuffled"},
    ),
    "accelerate": Subject(
        what="torch's DataLoader, prepared", script="train_accelerate.py", needs="transformers", tail="repeats"
    ),
    "torchtitan": Subject(
        what="tokenmill.torchtitan.DataLoader, CheckpointManager",
        script="train_torchtitan.py",
        needs="torchtitan",
        page="train-with-torchtitan.md",
    ),
    "jax": Subject(what="tokenmill.jax.DataLoader", script="train_jax.py", needs="grain", page="train-with-jax.md"),
    "grain": Subject(
        what="tokenmill.jax.DataSource in Grain",
        script="train_grain.py",
        needs="grain",
        resume_on=(2,),  # Grain's states belong to one number of processes
    ),
    "megatron": Subject(
        what="GPTDataset of Megatron-core on a shard as it is",
        script="train_megatron.py",
        needs="megatron",
        epochs=1,  # a second epoch of Megatron's begins where the first one ends, so its samples are others
        stop_at=10,
        documents=1,  # Megatron shuffles documents before it cuts samples; those of one document are our windows
    ),
}


def make_environment(name: str) -> tuple[str, str]:
    """The Python of an environment with tokenmill and its packages, and why there is none if that fails."""
    packages, folder = ENVIRONMENTS[name], FOLDER / name
    python, done = str(folder / "bin/python"), folder / ".done"
    if done.exists() and done.read_text() == " ".join(packages):
        return python, ""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "--upgrade", "pip>=25.1"]]
    steps += [[*pip, package] for package in packages if package == TORCH]
    steps += [[*pip, "--editable", str(ROOT), *packages]]
    for step in steps:
        ended = subprocess.run(step, capture_output=True, text=True, check=False)
        if ended.returncode:
            errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
            return "", (errors or ["pip failed"])[-1]
    done.write_text(" ".join(packages))
    return python, ""


def versions(python: str, packages: Sequence[str]) -> str:
    names = [package.partition("=")[0] for package in packages]
    code = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    return subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True).stdout.strip()


def examine(subject: Subject, work: Path) -> tuple[str, str]:
    """The versions, and the outcome in words. The second begins with "no" if something is not as it should be."""
    python, reason = make_environment(subject.needs)
    if not python:
        return ", ".join(ENVIRONMENTS[subject.needs]), f"no: does not install: {reason}"
    os.environ.update(subject.environment)
    work.mkdir()
    try:
        run_page(python, subject.page, work)
        found = prove(
            subject.script,
            make_dataset(work / "data", documents=subject.documents),
            work,
            python=python,
            tail=subject.tail,
            epochs=subject.epochs,
            stop_at=subject.stop_at,
            resume_on=subject.resume_on,
        )
    except AssertionError as error:
        return versions(python, ENVIRONMENTS[subject.needs]), f"no: {error}"
    finally:
        for name in subject.environment:
            del os.environ[name]
    return versions(python, ENVIRONMENTS[subject.needs]), describe(subject, found)


def run_page(python: str, page: str, work: Path) -> None:
    """The Python of a how-to page, in the environment of its framework."""
    if not page:
        return
    (work / "page/corpus").mkdir(parents=True)
    write_parquet(work / "page/corpus/a.parquet", make_texts(400))
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    ended = subprocess.run([python, "-c", code], cwd=work / "page", capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{page} fails\n{ended.stderr}"


def describe(subject: Subject, found: Outcome) -> str:
    resumed = " and ".join(str(ranks) for ranks in subject.resume_on)
    return f"yes: {found.samples} samples, {found.losses} losses; 2 ranks, then {resumed}; {TAILS[found.tail]}"


def main(names: Sequence[str]) -> int:
    unknown = sorted(set(names) - set(SUBJECTS))
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    rows, failures = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names or SUBJECTS:
            subject = SUBJECTS[name]
            installed, outcome = examine(subject, Path(folder, name))
            print(f"{name}: {outcome}", flush=True)
            failures += outcome.startswith("no")
            rows.append(f"| {name} | {subject.what} | {installed} | {outcome.splitlines()[0]} |")
    print("\n| | what trains | with | every sample once, labels and losses right |\n|---|---|---|---|")
    print(*rows, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
