"""All errors in one class tree, with hints and exit codes.

    TokenmillError                exit code 1
    ├── RecipeError               2    what was asked for cannot be done as asked
    │   ├── TokenizerError        2    unknown, unreadable, or without an EOT
    │   ├── UnknownSplitError     2    a dataset has no split of that name; a KeyError too
    │   └── OutputError           2    the output folder contains other files
    ├── SourceError               1    a source cannot be read; names file and position
    │   ├── SourceChangedError    1    a source is not what the plan pinned
    │   └── NotTextError          1    a source is not text
    ├── ParityError               1    the engine and its reference disagree on a document
    ├── StorageError              1    a write or a read of the output failed
    │   ├── DiskFullError         1    no space left; says how much is missing
    │   ├── FileLimitError        1    a file may not grow further (ulimit -f, or the file system's own limit)
    │   ├── AccessError           1    this user may not do that
    │   ├── DeterminismError      1    the same unit gave other bytes
    │   ├── ObjectChangedError    1    an object was replaced while it was read
    │   └── SilentStoreError      1    a store does not answer at all
    ├── BadDocumentError          1    a bad document under --on-bad fail
    ├── BuildError                1    units failed, or the totals do not agree
    │   └── DamagedPieceError     1    a finished unit's file changed before the commit
    ├── DatasetError              4    not a dataset, or a damaged one
    │   ├── MissingFileError      4    a file of it is not there
    │   └── NotADatasetError      2    a folder or URL that never was a dataset, or is not there
    ├── StateError                1    a loader's state that belongs to another stream
    ├── LockedError               5    another build works on this output
    └── Interrupted             130    stopped by the user

Every error says what happened and where. Its `hint` says what to do, and is a note, so that a traceback shows it.
Both name settings as Python does, in backquotes: `restart=True`. The command line shows its options in their place
(`tokenmill.cli.options.for_shell`).

Errors cross process boundaries as plain records (`to_record`, `from_record`), never as pickles. Secrets are removed
from messages and hints here, before they are printed, logged or written.
"""

from __future__ import annotations

import errno
import os
import re

_RIGHTS = "give this user the rights to it (ls -ld shows who has them), or run as a user who has them"


class TokenmillError(Exception):
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = redact(message)
        self.hint = redact(hint)
        super().__init__(self.message)
        if self.hint:
            self.add_note(f"hint: {self.hint}")


class RecipeError(TokenmillError):
    exit_code = 2


class TokenizerError(RecipeError):
    pass


class UnknownSplitError(RecipeError, KeyError):
    """A dataset is a mapping of splits, so a missing one is a `KeyError`, too."""

    __str__ = Exception.__str__  # KeyError shows its message in quotes


class OutputError(RecipeError):
    pass


class SourceError(TokenmillError):
    pass


class SourceChangedError(SourceError):
    pass


class NotTextError(SourceError):
    pass


class ParityError(TokenmillError):
    pass


class StorageError(TokenmillError):
    pass


class DiskFullError(StorageError):
    pass


class FileLimitError(StorageError):
    pass


class AccessError(StorageError):
    pass


class DeterminismError(StorageError):
    pass


class ObjectChangedError(StorageError):
    pass


class SilentStoreError(StorageError):
    pass


class BadDocumentError(TokenmillError):
    pass


class BuildError(TokenmillError):
    pass


class DamagedPieceError(BuildError):
    pass


class DatasetError(TokenmillError):
    exit_code = 4


class MissingFileError(DatasetError):
    pass


class NotADatasetError(DatasetError):
    exit_code = 2


class StateError(TokenmillError):
    """A loader's state that belongs to another stream."""


class LockedError(TokenmillError):
    exit_code = 5


class Interrupted(TokenmillError):  # noqa: N818  an interruption is not an error of anyone's
    exit_code = 130


def hint_for(error: OSError, otherwise: str) -> str:
    """What to do about an error of the system: a want of rights is not mended by anything else."""
    if error.errno == errno.EROFS:
        return "its file system is mounted read-only: mount it for writing, or choose another place"
    return _RIGHTS if error.errno in (errno.EACCES, errno.EPERM) else otherwise


def is_failure(error: BaseException) -> bool:
    """Whether something went wrong, as opposed to being interrupted. A panic of a library in Rust is no `Exception`."""
    return isinstance(error, Exception) or is_panic(error)


def is_panic(error: BaseException) -> bool:
    """Whether native code of a library gave up. Rust's panics have no public name."""
    return type(error).__name__ == "PanicException"


def _tree(root: type[TokenmillError]) -> dict[str, type[TokenmillError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


MORE_MEMORY = "prepare with a lower `max_document_bytes`, use fewer `workers`, or allow more memory"


def to_record(error: BaseException) -> dict[str, str]:
    """A plain record of an error, for another process."""
    if isinstance(error, MemoryError):
        error = BuildError("there is not enough memory", hint=MORE_MEMORY)
    if isinstance(error, TokenmillError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"kind": "", "message": redact(f"{type(error).__name__}: {error}"), "hint": ""}


def from_record(record: dict[str, str]) -> TokenmillError:
    """The error that `to_record` wrote down."""
    kind = _tree(TokenmillError).get(record["kind"], TokenmillError)
    return kind(record["message"], hint=record["hint"])


_SECRET_NAMES = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "KEY", "KEY_ID")
_USER = re.compile(r"\b([a-z][a-z0-9+.-]*:/{1,3})[^\s/@'\"]+@", re.IGNORECASE)
_QUERY = re.compile(r"\?[\w.~-]+=[^\s'\"]*")
_MIN_CHARS = 6


def redact(text: str) -> str:
    """The text without users and queries of URLs, and without the values of variables that are named like secrets."""
    text = _QUERY.sub("?***", _USER.sub(r"\1***@", text))
    for name in os.environ:
        if name.upper().endswith(_SECRET_NAMES) and len(value := os.environ.get(name, "")) >= _MIN_CHARS:
            text = text.replace(value, "***")
    return text
