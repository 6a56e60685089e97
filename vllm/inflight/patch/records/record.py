"""Records of changes to upstream, which are checked before they are applied.

A record names its target and the signature that it expects there. It says why the
change is needed and when it can be removed. `around` gets the original callable and
returns its replacement. A record with `expects=None` adds a name that must be free.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm.inflight.attached import ATTRIBUTE, Attached
from vllm.inflight.errors import UpstreamChanged
from vllm.inflight.releases.table import SIGNATURES, differing, holds

Original = Callable[..., Any]
"""The function of upstream that a patch replaces, with any parameters."""

MARK = "__inflight_patch__"
RAYS = "_ray_trace_ctx"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One change to upstream."""

    target: str
    """`module:attribute.path` of the callable that is changed or added."""
    expects: tuple[str, ...] | None
    """Its parameters in the reference release; None for a name that we add."""
    why: str
    """The reason, in one sentence."""
    remove_when: str
    """What upstream would have to offer for this to go."""
    around: Callable[[Any], Any]
    """Original → replacement (None → addition where `expects` is None)."""
    only_on: str | None = None
    """The platform of the target's module; None for all platforms. Importing a module
    of another platform may change torch for the whole process."""
    is_late: bool = False
    """Whether it is applied when a worker first uses the module, as not every process
    can import that."""
    is_public: bool = False
    """Whether users' modules call the function. One that has imported it by name before
    the patch gets the replacement, too."""
    since: str | None = None
    """The first release of vLLM that it is for; None for the oldest."""
    before: str | None = None
    """The first release that it is not for any more; None for every later release."""

    def is_meant(self) -> bool:
        """Whether the patch is for the platform and the vLLM of this process."""
        if not holds(self.since, self.before):
            return False
        if self.only_on is None:
            return True
        from vllm.platforms import current_platform

        return self.only_on == current_platform.device_type


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """A method of upstream that a class of ours overrides.

    An override of a method that upstream no longer calls fails silently, so its target
    is checked like that of a patch.
    """

    target: str
    """`module:Class.method` of upstream."""
    expects: tuple[str, ...]
    """Its parameters in the reference release."""
    why: str
    """The reason, in one sentence."""
    remove_when: str
    """What upstream would have to offer for this to go."""
    since: str | None = None
    """The first release of vLLM that it is for; None for the oldest."""
    before: str | None = None
    """The first release that it is not for any more; None for every later release."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Private:
    """A private name of upstream that code of ours calls, reads or writes."""

    target: str
    """`module:Class.name`: a method, or an attribute that the class assigns."""
    why: str
    """The reason, in one sentence."""
    remove_when: str
    """What upstream would have to offer for this to go."""
    expects: tuple[str, ...] | None = None
    """Parameters of a method; None for an attribute."""
    since: str | None = None
    """The first release of vLLM that it is for; None for the oldest."""
    before: str | None = None
    """The first release that it is not for any more; None for every later release."""

    @property
    def name(self) -> str:
        """The private name itself."""
        return self.target.rpartition(":")[2].rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribute:
    """An attribute that we set on objects of a class of upstream.

    Upstream must have none of that name, in the class or in one that it is derived of.
    """

    target: str
    """`module:Class` of upstream."""
    holds: str
    """`module:Class` of ours: what the attribute has."""
    why: str
    """What it is for, in one sentence."""
    remove_when: str
    """What upstream would have to offer for this to go."""
    name: str = ATTRIBUTE
    """The attribute; another name than the usual one is for users, who read it."""
    since: str | None = None
    """The first release of vLLM that it is for; None for the oldest."""
    before: str | None = None
    """The first release that it is not for any more; None for every later release."""


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


def signature_of(function: object) -> tuple[str, ...]:
    """The parameter names of a function, static method or class method.

    The parameter that Ray adds to methods of its actors is left out.
    """
    names = inspect.signature(plain(function)).parameters
    return tuple(name for name in names if name != RAYS)


def plain(function: object) -> Any:
    """The function inside a static or class method."""
    return getattr(function, "__func__", function)


def expected_of(patch: Patch | Override | Private) -> tuple[str, ...] | None:
    """The parameters that a record expects in the vLLM of this process."""
    return differing(SIGNATURES.get(patch.target), patch.expects)


def problem_with(patch: Patch | Override | Private) -> str | None:
    """What is wrong with a record on this vLLM; None if it fits."""
    from vllm.version import __version__ as release

    try:
        owner, name, found = locate(patch.target)
    except (UpstreamChanged, ImportError) as error:
        return f"{error} (vLLM {release})"
    if isinstance(patch, Private) and patch.expects is None:
        if found is None and not _assigns(owner, name):
            return f"{patch.target} is gone from vLLM {release}"
        return None
    expected = expected_of(patch)
    if expected is None:
        if found is not None and not hasattr(plain(found), MARK):
            return f"{patch.target} exists in vLLM {release}; we meant to add it"
        return None
    if found is None:
        return f"{patch.target} is gone from vLLM {release}"
    got = signature_of(found)
    if got != expected:
        return (
            f"{patch.target} has parameters {got} in vLLM {release}, "
            f"expected {expected}"
        )
    return None


def problem_with_attribute(record: Attribute) -> str | None:
    """What keeps us from setting an attribute in this vLLM; None if nothing does."""
    from vllm.version import __version__ as release

    ours: type
    try:
        *_, kind = locate(record.target)
        *_, ours = locate(record.holds)
    except (UpstreamChanged, ImportError) as error:
        return f"{error} (vLLM {release})"
    if not isinstance(kind, type):
        return f"{record.target} is gone from vLLM {release}"
    if not isinstance(ours, type):
        return f"{record.holds} is no class of vllm-inflight"
    if record.name == ATTRIBUTE and not issubclass(ours, Attached):
        return f"{record.holds} is not derived from Attached"
    if not kind.__dictoffset__:
        return f"{record.target} has no room for attributes in vLLM {release}"
    for base in kind.__mro__[:-1]:
        is_there = record.name in vars(base) or _names(base, record.name)
        if is_there:
            return (
                f"{record.target} has a {record.name} of upstream's in vLLM {release}, "
                f"from {base.__module__}.{base.__qualname__}; we meant to set it"
            )
    return None


def _names(kind: type, name: str) -> bool:
    """Whether the code of a class has a name in it, whatever for."""
    try:
        code = inspect.getsource(kind)
    except (OSError, TypeError):  # it is not written in Python
        return False
    return re.search(rf"\b{name}\b", code) is not None


def _assigns(owner: Any, name: str) -> bool:
    """Whether the code of `owner`, a class or a module, assigns attribute `name`."""
    made = rf'\.{name}\b(: [^=\n]+)?( =|\n)|register_buffer\(\s*"{name}"'
    return re.search(made, inspect.getsource(owner)) is not None


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
    if expected_of(patch) is not None:
        replacement = functools.wraps(original)(replacement)
    if callable(replacement):
        setattr(replacement, MARK, patch.target)
    if isinstance(found, staticmethod | classmethod):
        replacement = type(found)(replacement)
    setattr(owner, name, replacement)
    if patch.is_public:
        for module, imported_as in _imports(original):
            setattr(module, imported_as, replacement)


def _imports(function: Any) -> list[tuple[ModuleType, str]]:
    """The modules that have imported a function of upstream by name, and that name.

    Upstream's own are left out, all but the one that defines it: users may import it
    from there.
    """
    return [
        (module, name)
        for path, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and _may_import(path, function)
        for name, value in list(vars(module).items())
        if value is function
    ]


def _may_import(path: str, function: Any) -> bool:
    is_upstreams = path.startswith("vllm.") and not path.startswith("vllm.inflight.")
    return not is_upstreams or path == function.__module__
