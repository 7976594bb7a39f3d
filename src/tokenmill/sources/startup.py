"""Arrow in a worker: on one core, and started quickly.

At its first conversion of a Python object, pyarrow imports pandas if it is installed, which takes
longer than most of what a worker loads. tokenmill needs none of it.
"""

from __future__ import annotations

import sys

import pyarrow as pa


class _NoPandas:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ImportError("not now")


def start_arrow() -> None:
    """Let pyarrow find no pandas, for the life of this process; whoever wants pandas may still import it.

    Only for our own workers: a program that uses the library may want what Arrow does with pandas, and all cores.
    """
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas)
        try:
            pa.array([""])
        finally:
            sys.meta_path.remove(_NoPandas)
