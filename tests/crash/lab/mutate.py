"""Changing valid files into hostile ones: blindly, byte by byte, or knowing that they are JSON.

`bytes_of` does to any file what bad luck and bad tools do. `value_of` changes a value inside of JSON and
leaves the rest whole, so that what reads it gets far before it meets the change; `reseal` then gives it
the seal of an honest record.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from typing import Any

HUGE = (10**19, 2**62, 2**63, 2**64, 10**400, -1, -2, -(2**63), 2**31, 2**31 - 1, 2**32, 0, 1, 65536)
ODD_TEXTS = (
    *("", ".", "..", "../x", "/etc/passwd", "a/../../b", "a//b", "/", "-", "C:\\x", "train/..", ".build/plan.json"),
    *(
        "\x00",
        "a\nb",
        "é",
        "\ud800",
        "x" * 300,
        "x" * 5000,
        "NaN",
        "1e999",
        "0",
        "train",
        "__class__",
        "{",
        "<|endoftext|>",
    ),
)
ODD_VALUES: tuple[Any, ...] = (None, True, False, (), 0.5, -0.0, 1e308, *HUGE, *ODD_TEXTS)
_TOKENS = (
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"null",
        b"true",
        b'""',
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
        b'"',
        b"\\",
        b"\n",
    ),
    *(b"\\ud800", b"\xff", b"\x00", b"1e999", b"9" * 50, b"9" * 5000, b"-", b"..", b"/", b"[" * 100, b'{"a":' * 100),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"0x", b"_", b"#", b"&a ", b"*a", b"!!", b"---", b": ", b"- ", b"\t"),
)
_NUMBERS = tuple(struct.pack(f"<{code}", number) for code, number in (
    *(("B", n) for n in (0, 1, 127, 128, 255)),
    *(("I", n) for n in (0, 1, 2**31 - 1, 2**31, 2**32 - 1)),
    *(("Q", n) for n in (0, 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)),
))  # fmt: skip


def bytes_of(data: bytes, chance: random.Random, other: bytes = b"") -> bytes:
    """Some bytes changed, cut, moved, doubled, or taken from `other`."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        at = int(chance.random() * (len(changed) + 1))
        kind = int(chance.random() * 9)
        size = int(chance.random() ** 3 * 64) + 1
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << int(chance.random() * 8)
        elif kind == 1 and at < len(changed):
            changed[at] = int(chance.random() * 256)
        elif kind == 2:
            changed[at:at] = chance.choice(_TOKENS)
        elif kind == 3:
            token = chance.choice(_TOKENS)
            changed[at : at + len(token)] = token
        elif kind == 4:
            number = chance.choice(_NUMBERS)
            changed[at : at + len(number)] = number
        elif kind == 5:
            del changed[at : at + size]
        elif kind == 6:
            changed[at:at] = changed[at : at + size] * chance.choice((1, 1, 2, 50))
        elif kind == 7:
            del changed[at:]
        else:
            start = int(chance.random() * (len(other) + 1))
            changed[at : at + size] = other[start : start + size]
    return bytes(changed)


def value_of(text: bytes, chance: random.Random) -> bytes:
    """JSON with some of its values, keys or items changed; most of the time it is still JSON."""
    tree = json.loads(text)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        tree = _change(tree, chance)
    changed = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
    kind = chance.random()
    if kind < 0.04 and text.startswith(b"{"):
        return b"{" + _member(text, chance) + b"," + changed[1:]
    if kind < 0.07:
        return changed.replace(b":0", b":" + chance.choice((b"NaN", b"1e999", b"-Infinity", b"9" * 5000, b"0.1e1")), 1)
    return changed


def _change(tree: Any, chance: random.Random) -> Any:
    """Walk down to some place, and change what is there."""
    parent, node = None, tree
    key: Any = None
    while isinstance(node, dict | list) and node and (parent is None or chance.random() < 0.8):
        parent = node
        key = chance.choice(list(node)) if isinstance(node, dict) else int(chance.random() * len(node))
        node = node[key]
    if parent is None:
        return chance.choice(ODD_VALUES)
    kind = chance.random()
    if kind < 0.5:
        parent[key] = chance.choice(ODD_VALUES)
    elif kind < 0.55:
        parent[key] = chance.choice((list, dict))()
    elif kind < 0.65 and isinstance(node, int):
        parent[key] = node + chance.choice((-1, 1, 2, -node - 1))
    elif kind < 0.72:
        del parent[key]
    elif kind < 0.80:
        deep: Any = node
        for _ in range(chance.choice((1, 3, 14, 20, 200))):
            deep = [deep] if chance.random() < 0.5 else {"x": deep}
        parent[key] = deep
    elif kind < 0.90:
        odd = chance.choice(ODD_TEXTS)
        if isinstance(parent, dict):
            parent[odd] = parent.pop(key) if chance.random() < 0.5 else node
        else:
            parent.insert(key, node)
    elif isinstance(parent, list):
        parent.reverse()
    else:
        other = chance.choice(list(parent))
        parent[key], parent[other] = parent[other], parent[key]
    return tree


def same_kind_of(text: bytes, chance: random.Random) -> bytes:
    """JSON with some of its values changed to others of their kind, so that every type is still right."""
    tree = json.loads(text)
    leaves: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        for key in node if isinstance(node, dict) else range(len(node)):
            if isinstance(node[key], dict | list):
                stack.append(node[key])
            else:
                leaves.append((node, key))
    for _ in range(chance.choice((1, 1, 2, 3))):
        node, key = chance.choice(leaves)
        value = node[key]
        if isinstance(value, str):
            node[key] = chance.choice((*ODD_TEXTS, value[1:], value + "x", value.upper()))
        elif isinstance(value, bool) or value is None:
            node[key] = chance.choice((True, False, None, 1, "x"))
        else:
            node[key] = chance.choice((*HUGE, value + 1, value - 1, 2 * value))
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def _member(text: bytes, chance: random.Random) -> bytes:
    """A member of an object, to be there twice."""
    body = json.loads(text)
    key = chance.choice(list(body))
    return json.dumps({key: body[key]}, separators=(",", ":")).encode()[1:-1]


def body_of(sealed: bytes) -> bytes:
    """The JSON of a sealed record, without its seal."""
    body = json.loads(sealed)
    del body["seal"]
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def reseal(text: bytes) -> bytes:
    """A seal that is right, whatever it is put on."""
    return text[:-1] + b',"seal":"' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'
