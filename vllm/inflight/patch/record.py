"""A patch is a record that refuses surprises.

A record names its target, the signature it expects there, why the change is
needed and when it can go. `around` gets the original callable and returns the
one that takes its place; a record with `expects=None` adds a name that must be
free.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.inflight.errors import UpstreamChanged

MARK = "__inflight_patch__"
RAYS = "_ray_trace_ctx"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One change to upstream."""

    target: str
    """`module:attribute.path` of the callable that is changed or added."""
    expects: tuple[str, ...] | None
    """Its parameters in the tested release; None for a name that we add."""
    why: str
    """The reason, in one sentence."""
    remove_when: str
    """What upstream would have to offer for this to go."""
    around: Callable[[Any], Any]
    """Original → replacement (None → addition where `expects` is None)."""
    only_on: str | None = None
    """The platform that the target's module is of: to import that of another may change
    torch for all of the process, as those of the CPU do."""

    def is_meant(self) -> bool:
        """Whether it is for the platform of this process."""
        if self.only_on is None:
            return True
        from vllm.platforms import current_platform

        return self.only_on == current_platform.device_type


def locate(target: str) -> tuple[Any, str, Any]:
    """(owner, attribute name, static attribute or None) of a target."""
    module_name, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in owners:
        found = getattr(owner, part, None)
        if found is None:
            raise UpstreamChanged(f"{target}: {part} is gone from this vLLM")
        owner = found
    if isinstance(owner, type):
        return owner, name, inspect.getattr_static(owner, name, None)
    return owner, name, getattr(owner, name, None)


def signature_of(function: Any) -> tuple[str, ...]:
    """The parameter names of a function, static method or class method.

    Without the one that Ray adds to the methods of its actors, and of their bases.
    """
    names = inspect.signature(plain(function)).parameters
    return tuple(name for name in names if name != RAYS)


def plain(function: Any) -> Any:
    """The function inside a static or class method."""
    return getattr(function, "__func__", function)


def problem_with(patch: Patch) -> str | None:
    """What is wrong with a patch on this vLLM; None if it fits."""
    from vllm.version import __version__ as release

    try:
        _, _, found = locate(patch.target)
    except (UpstreamChanged, ImportError) as error:
        return f"{error} (vLLM {release})"
    if patch.expects is None:
        if found is not None and not hasattr(plain(found), MARK):
            return f"{patch.target} exists in vLLM {release}; we meant to add it"
        return None
    if found is None:
        return f"{patch.target} is gone from vLLM {release}"
    got = signature_of(found)
    if got != patch.expects:
        return (
            f"{patch.target} has parameters {got} in vLLM {release}, "
            f"expected {patch.expects}"
        )
    return None


def apply(patch: Patch) -> None:
    """Put a patch in place, once; raises `UpstreamChanged` if it does not fit."""
    wrong = problem_with(patch)
    if wrong is not None:
        raise UpstreamChanged(f"vllm-inflight cannot start: {wrong}")
    owner, name, found = locate(patch.target)
    original = plain(found)
    if getattr(original, MARK, None) == patch.target:
        return
    replacement = patch.around(original)
    if patch.expects is not None:
        replacement = functools.wraps(original)(replacement)
    if callable(replacement):
        setattr(replacement, MARK, patch.target)
    if isinstance(found, staticmethod | classmethod):
        replacement = type(found)(replacement)
    setattr(owner, name, replacement)
