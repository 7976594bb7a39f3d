"""gigatoken without awkward: the same ids, in processes that run nothing but ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tokenmill
from tokenmill.tokenizers.engine import stand_in

# What a fresh process makes of some batches with a stand-in that lacks something, and with which module.
SCRIPT = """
import sys
from tokenmill.sources.base import text_array
from tokenmill.tokenizers import engine, spec
ragged = engine

if "awkward" not in sys.argv:
    ragged.stand_in()
for name in sys.argv[1:]:
    vars(ragged._STAND_IN).pop(name, None)
encode = engine.open_engine(spec.resolve("gpt2")).encode
for texts in (["hello world", "", "zw\\u00f6lf \\u6f22\\u5b57"], [""], ["a" * 5000, "\\n\\n", "\\U0001f600"], []):
    found = encode(text_array(texts))
    print(found.ids.dtype, found.ids.tolist(), found.lengths.tolist())
print("without" if sys.modules["awkward"] is ragged._STAND_IN else "awkward", file=sys.stderr)
"""


def encoded(*lacking: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *lacking], check=True, capture_output=True, text=True)
    return done.stdout, done.stderr.strip()


def test_the_stand_in_gives_what_awkward_gives() -> None:
    without, with_it = encoded(), encoded("awkward")
    assert without == (with_it[0], "without")
    assert with_it[1] == "awkward"
    assert (
        without[0].splitlines()[0] == f"uint32 {[31373, 995, 89, 86, 9101, 1652, 10545, 120, 95, 27764, 245]} [2, 0, 9]"
    )


@pytest.mark.parametrize("lacking", ["flatten", "num", "unflatten", "Array"])
def test_a_gigatoken_that_asks_for_more_gets_the_real_one(lacking: str) -> None:
    assert encoded(lacking) == (encoded()[0], "awkward")


def test_what_is_loaded_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType("awkward")
    monkeypatch.setitem(sys.modules, "awkward", loaded)
    stand_in()
    assert sys.modules["awkward"] is loaded


def test_an_engine_is_opened_without_awkward() -> None:
    start = "import sys; from tokenmill.executors.worker import prepare_tokenizer; prepare_tokenizer('gpt2')"
    code = f"{start}; sys.exit('awkward' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_filter_in_a_worker_has_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ragged_filter.py").write_text(
        "import awkward as ak\ndef keep(text): return int(ak.max(ak.Array([[len(text)], []]))) > 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a.txt").write_text("one\nthree\nfive\n")
    found = tokenmill.prepare(str(tmp_path / "a.txt"), tmp_path / "out", workers=2, filter="ragged_filter:keep")
    assert found.documents == 2
