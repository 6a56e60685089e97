"""Inputs that are almost right: values and bytes with something wrong in them."""

from __future__ import annotations

import copy
import random
from typing import Any

HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(10**300, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", " ", "\0", "a", "a" * 5000, "\u202e", "\ud800", "é" * 300, "%s%n", "{}"),
    *("..", "../..", "/", "/etc/passwd", "//", "~", "file:///", "tcp://[", "tcp://a:b"),
    *("__class__", "__dict__", "torch.float32", "float32", "Tensor", "load", "qint8"),
    *([], {}, [[]], [None], {"": None}, {"a": []}, {"__class__": "a"}),
]
WORDS = (
    b"\x00",
    b"\xff" * 8,
    b"\x00" * 8,
    b"{",
    b"}",
    b'"',
    b"[",
    b"0",
    b"-1",
    b"\x80",
)


def value(rng: random.Random, seed: Any) -> Any:
    """A copy of plain data with one to four things changed."""
    root = [copy.deepcopy(seed)]
    for _ in range(rng.randint(1, 4)):
        holder, key = rng.choice(_places(root))
        change = rng.randrange(6)
        if change == 0 and holder is not root:
            del holder[key]
        elif change == 1 and isinstance(holder, list) and holder is not root:
            holder.insert(key, copy.deepcopy(holder[key]))
        elif change == 2 and isinstance(holder, dict):
            holder[rng.choice(HOSTILE[17:24])] = holder[key]
        elif change == 3:
            other, place = rng.choice(_places(root))
            holder[key] = copy.deepcopy(other[place])
        elif change == 4:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
        else:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    return root[0]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Every (container, key) in it, the whole itself included."""
    found: list[tuple[Any, Any]] = []
    left: list[Any] = [root]
    while left:
        holder = left.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            found.append((holder, key))
            if isinstance(holder[key], list | dict):
                left.append(holder[key])
    return found


def octets(rng: random.Random, seed: bytes) -> bytes:
    """A copy of `seed` with one to four things changed."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        change = rng.randrange(5)
        if change == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif change == 1:
            data[at:at] = rng.choice(WORDS)
        elif change == 2:
            del data[at : at + rng.randint(1, 9)]
        elif change == 3:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.randint(1, 32)]
        else:
            del data[at:]
    return bytes(data)
