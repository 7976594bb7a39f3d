"""Secrets stay out of what is printed, logged or written: whatever an error says goes through here."""

from __future__ import annotations

import os
import re

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
