"""The real file system, with a hand on every operation that goes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.storage.filesystem import LOCAL, FileSystem

# The operation's number and name, the real one, and its arguments; gives what the operation gives.
Act = Callable[[int, str, Callable[..., Any], tuple[Any, ...]], Any]


class Tapped:
    """A file system that has `act` do each operation, or something else in its place."""

    def __init__(self, act: Act, under: FileSystem = LOCAL) -> None:
        self.count = 0
        self._act = act
        self._under = under

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._under, name)

        def operation(*arguments: Any) -> Any:
            number = self.count
            self.count += 1
            return self._act(number, name, real, arguments)

        self.__dict__[name] = operation  # the next call finds it at once
        return operation


def operations(run: Callable[[FileSystem], object]) -> list[str]:
    """The names of all operations that `run` does, in their order."""
    names: list[str] = []

    def act(_: int, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        names.append(name)
        return real(*arguments)

    run(Tapped(act))
    return names
