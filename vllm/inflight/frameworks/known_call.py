"""A known call: a worker call of another framework that writes weights.

A framework adds a class of its own to vLLM's workers (`worker_extension_cls`) and calls
its methods by `collective_rpc`. A `KnownCall` says what one of these methods means. The
engine core then executes the method on the shadow weights, as part of an update. This
is called adoption.

A call is recognised by the name of the method and by the names of its parameters. A
private fork with another method is not recognised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Arguments = Mapping[str, Any]
"""The arguments of a call by name; a parameter that was left out is missing."""


class Role(StrEnum):
    """What a call does to the version that it belongs to."""

    VERSION = "version"
    """It brings a whole version."""
    BEGIN = "begin"
    """It begins a version, and brings no tensor."""
    PART = "part"
    """It brings some tensors. `is_last` tells the last call of a version; without
    `is_last`, another call ends it."""
    COMPLETING = "completing"
    """It brings some tensors. The version ends when every parameter is written."""
    END = "end"
    """It ends a version, and brings no tensor."""


def _never(_: Any) -> None:
    return None


def _no_names(_: Arguments) -> Sequence[str]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownCall:
    """One worker call of a framework.

    A package adds calls of its own by an entry point of the group
    `vllm_inflight.known_calls`, which names a `KnownCall` or a list of them.
    """

    framework: str
    """The framework's name. Calls of one framework belong to the same version."""
    method: str
    """The method of the worker extension."""
    parameters: tuple[str, ...]
    """The names of the method's parameters, in order, without `self`."""
    role: Role
    """What the call does to its version."""
    is_last: Callable[[Arguments], bool] | None = None
    """Whether a `PART` is the last one of its version."""
    label: Callable[[Arguments], str | None] = _never
    """The version's label, if the call has it; None: `update-<epoch>`."""
    names: Callable[[Arguments], Sequence[str]] = _no_names
    """The names of the tensors that the call brings, if its arguments tell."""
    failure: Callable[[Any], str | None] = _never
    """Why the result of one rank means that the call has failed; None if it has not.
    Every call that raises has failed."""
    obstacle: Callable[[Arguments], str | None] = _never
    """Why a call with these arguments is not adopted, as a clause; None if it is."""
    may_lack: bool = False
    """Whether a version may leave out tensors, which then keep their live values. The
    first version of a framework decides which, and later versions have to agree."""
    takes_quantised: bool = True
    """Whether the method loads a quantised model as it loads any other one."""
    is_alone: bool = False
    """Whether the method needs the groups of ranks that decode. It is then adopted on
    engines of one rank only."""
    private: tuple[str, ...] = ()
    """Attributes that the method keeps on the worker and that refer to parameters. They
    stay apart from the worker's own attributes."""

    def bound(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Arguments | None:
        """The arguments of a call by name; None if they do not fit the parameters."""
        given = dict(zip(self.parameters, args, strict=False))
        is_fit = len(args) <= len(self.parameters) and given.keys().isdisjoint(kwargs)
        if not is_fit or not set(self.parameters).issuperset(kwargs):
            return None
        return given | dict(kwargs)

    def is_of(self, methods: Mapping[str, Sequence[str]]) -> bool:
        """Whether workers with these methods have the method of this call.

        Args:
            methods: name → names of the parameters, as from `methods_of`.

        """
        return tuple(methods.get(self.method, ("",))) == self.parameters


def methods_of(worker: type, calls: Iterable[KnownCall]) -> dict[str, list[str]]:
    """The methods of a worker class that have the name of a known call.

    Returns:
        name → names of the parameters, without `self`.

    """
    found: dict[str, list[str]] = {}
    for name in {call.method for call in calls}:
        method = inspect.getattr_static(worker, name, None)
        if not inspect.isfunction(method):
            continue
        found[name] = list(inspect.signature(method).parameters)[1:]
    return found
