"""Control calls, from an API process to its engine cores, each declared once.

A sender makes a call: api/control/, or a method of `LLM`. `Controller.answer` in
engine/controller.py has one case for each. Between processes a call travels as its name
and its fields. A field holds what the sender was given; the handler checks it.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_args

from vllm.inflight.errors import Malformed


@dataclass(frozen=True, slots=True)
class PauseDecoding:
    """Stop decoding between two steps, or renew the lease on that."""

    name: ClassVar = "pause"
    mode: str | None = None
    """What happens to running requests, see `PauseMode`; None: `abort`."""
    flush_cache: bool | None = None
    """Whether to drop the caches; None: no."""
    lease_s: float | None = None
    """Seconds until the pause ends; 0: never; None: `--inflight-pause-lease-s`."""
    owner: str | None = None
    is_trial: bool = False
    """Whether the engine only says if it would reject this pause."""


@dataclass(frozen=True, slots=True)
class ResumeDecoding:
    """End a pause."""

    name: ClassVar = "resume"
    owner: str | None = None
    """The owner of the pause; None ends the pause of any owner."""


Call = PauseDecoding | ResumeDecoding

CALLS: dict[str, type[Call]] = {kind.name: kind for kind in get_args(Call)}
"""Name → class of each control call."""


def call_to_dict(call: Call) -> dict[str, Any]:
    """The fields of a call as plain data, not copied."""
    return {field.name: getattr(call, field.name) for field in fields(call)}


def call_from_dict(name: str, values: dict[str, Any]) -> Call:
    """The call of that name with these fields; a field may be left out.

    Raises:
        Malformed: no call has that name, it has no such field, or it needs another one.

    """
    if (kind := CALLS.get(name)) is None:
        raise Malformed(f"no control call named {name!r}")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    for field in values:
        if field not in known:
            raise Malformed(
                f"the control call {name!r} has no field {field!r}; it takes "
                + (", ".join(known) or "none")
            )
    for field, is_needed in known.items():
        if is_needed and field not in values:
            raise Malformed(f"the control call {name!r} needs the field {field!r}")
    return kind(**values)
