"""What a control call asks for, checked where it takes effect.

The routes read text as well; who calls in Python says what he means.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight.errors import Malformed
from vllm.inflight.update import PauseMode


def flag(body: dict[str, Any], name: str) -> bool:
    """Whether `name` is asked for; raises `Malformed` unless it is a bool, or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Malformed(f"{name} must be true or false, got {value!r:.80}")
    return bool(value)


def mode(body: dict[str, Any], default: str) -> PauseMode:
    """Its `mode`; `default` where there is none, which `""` or 0 is not."""
    value = body.get("mode")
    return PauseMode.parse(default if value is None else value)
