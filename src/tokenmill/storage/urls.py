"""URLs of object stores: which ones are taken, and what they name.

    s3://bucket/some/prefix        S3 and what speaks its language (R2, MinIO, Ceph): AWS_ENDPOINT_URL names it
    gs://bucket/some/prefix        Google Cloud Storage
    az://container/some/prefix     Azure Blob Storage

Whatever else a URL may hold (users, queries, fragments, a second URL) is refused: secrets come from
the environment or a profile, and a name leads to one place only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenmill.errors import RecipeError

SCHEMES = ("s3", "gs", "az")
_ANY_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/:]")
_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*)(?:/(?P<key>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Url:
    """A bucket and a key in it: an object, a prefix, or a pattern of them."""

    scheme: str
    bucket: str
    key: str

    @property
    def root(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root


def is_url(place: str) -> bool:
    """Whether a place is a URL of any kind, or several chained. A slash is enough: pathlib takes the other one away."""
    return _ANY_SCHEME.match(place) is not None


def parse_url(place: str) -> Url:
    """The parts of a URL that tokenmill goes to; any other one is a `RecipeError` that shows nothing of it."""
    scheme = place.partition(":")[0]
    if scheme not in SCHEMES:
        raise RecipeError(
            f"{scheme}:// is neither read nor written by this version",
            hint=f"give a local path, or a URL of {', '.join(f'{known}://' for known in SCHEMES)}",
        )
    if not place.startswith(f"{scheme}://"):
        raise RecipeError(f"{scheme}: is not followed by //", hint="give a URL as a string: a Path changes it")
    found = _URL.fullmatch(place)
    if "@" in place.removeprefix(f"{scheme}://").partition("/")[0]:
        raise RecipeError(
            f"a {scheme}:// URL holds a user or a secret",
            hint="give credentials in the environment, or in a profile (AWS_PROFILE)",
        )
    if found is None:
        raise RecipeError(f"a {scheme}:// URL names no bucket", hint=f"write it like {scheme}://bucket/prefix")
    key = (found["key"] or "").rstrip("/")
    if what := wrong_key(key):
        raise RecipeError(f"a {scheme}:// URL holds {what}", hint=f"write it like {scheme}://bucket/prefix")
    return Url(scheme, found["bucket"], key)


def wrong_key(key: str) -> str:
    """What a key must not hold, if it does; else ""."""
    wrong = {
        "a second URL": "://" in key or "::" in key,
        "a query or a fragment": "#" in key or re.search(r"\?[\w.~-]+=", key) is not None,
        "a control character": not key.isprintable(),
        "an empty or a relative part": bool(key) and any(part in ("", ".", "..") for part in key.split("/")),
    }
    return next((what for what, is_there in wrong.items() if is_there), "")
