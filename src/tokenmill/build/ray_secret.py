"""Who may use a Ray: the secret that all its processes and drivers show to each other. Ray calls it a token.

    a Ray of our own             a new secret, known to its processes alone
    a cluster that Ray noted     the user's secret, if there is one, as `ray.init("auto")` would do
    a cluster at an address      what the environment says; a secret is not shown to just anyone

Ray by itself would write a secret to the user's home, where every later Ray program finds it, and would leave the
environment of this one changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import ray

MODE, SECRET, SECRET_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
USAGE = "RAY_USAGE_STATS_ENABLED"
HOME_PATH = "~/.ray/auth_token"


def of_our_own() -> dict[str, str]:
    """The environment in which a Ray of our own starts. It calls nobody."""
    return {MODE: "token", SECRET: secrets.token_hex(32), USAGE: "0"}


def of_the_user() -> dict[str, str]:
    """The environment in which a cluster of this machine is joined."""
    has_secret = os.environ.get(SECRET) or os.environ.get(SECRET_PATH) or os.path.exists(os.path.expanduser(HOME_PATH))
    return {MODE: "token"} if has_secret and MODE not in os.environ else {}


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables for what is started meanwhile. What was there before is there again in the end, whatever Ray did."""
    before = dict(os.environ)
    os.environ.update(changes)
    look_again()
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def look_again() -> None:
    """Have this process, which keeps the secret that it was told first, go by its environment again."""
    within: Any = ray._raylet
    with contextlib.suppress(AttributeError):  # a Ray that knows no secrets
        within.Config.initialize("")
        within.AuthenticationTokenLoader.instance().reset_cache()
