"""A quicker start of Arrow.

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


def start_without_pandas() -> None:
    """Let pyarrow find no pandas, for the life of this process; whoever wants pandas may still import it.

    Only for our own workers: a program that uses the library may want what Arrow does with pandas.
    """
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas)
        try:
            pa.array([""])
        finally:
            sys.meta_path.remove(_NoPandas)
