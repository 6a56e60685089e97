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
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from inspect import Parameter
from types import FunctionType, ModuleType
from typing import Any

from vllm.inflight.errors import EngineFault

logger = logging.getLogger(__name__)

VAR_POSITIONAL, VAR_KEYWORD = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD

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
    IN_PLACE = "in place"
    """It writes into the live weights by itself, and is never adopted. It counts as an
    out-of-band write also if nothing shows that it has written."""


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
    """The names of the method's parameters, in order, without `self`. The name of a
    parameter that takes any number of arguments begins with `*`."""
    role: Role
    """What the call does to its version."""
    is_last: Callable[[Arguments], bool] | None = None
    """Whether a `PART` is the last one of its version."""
    label: Callable[[Arguments], str | None] = _never
    """The version's label, if the call has it; None or "": `update-<epoch>`."""
    names: Callable[[Arguments], Sequence[str]] = _no_names
    """The names of the tensors that the call brings, if its arguments tell."""
    failure: Callable[[Any], str | None] = _never
    """Why the result of one rank means that the call has failed; None if it has not.
    Every call that raises has failed."""
    obstacle: Callable[[Arguments], str | None] = _never
    """Why a call with these arguments is not adopted, as a clause; None if it is."""
    is_single: bool = False
    """Whether each call brings one tensor. These are hundreds of calls, and each would
    wait for steps if decoding went on. So the first one lets an absorbed pause take
    force."""
    may_lack: bool = False
    """Whether a version may leave out tensors, which then keep their live values. The
    first version of a framework decides which, and later versions have to agree."""
    takes_quantised: bool = True
    """Whether the method loads a quantised model as it loads any other one."""
    load_steps: tuple[str, ...] = ()
    """Functions by which the method prepares layers for a load and processes them
    after it, as `module:function`. They have no effect in an adopted call, whose load
    is ours."""
    is_alone: bool = False
    """Whether the method needs the groups of ranks that decode. It is then adopted on
    engines of one rank only."""
    private: tuple[str, ...] = ()
    """Attributes that the method keeps on the worker and that refer to parameters. They
    stay apart from the worker's own attributes."""
    besides: tuple[str, ...] = ()
    """Other methods that the workers have, if the method and its parameters are not
    enough to tell. A row with these has to come before the one without."""

    @property
    def signature(self) -> str:
        """The method with its parameters."""
        return f"{self.method}({', '.join(self.parameters)})"

    @property
    def is_adopted(self) -> bool:
        """Whether such calls become updates, unless something stands against it."""
        return self.role is not Role.IN_PLACE

    def label_of(self, arguments: Arguments) -> str | None:
        """The version's label; None if a call with these arguments has none."""
        return self.label(arguments) or None  # no label is empty

    def bound(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Arguments | None:
        """The arguments of a call by name; None if they do not fit the parameters."""
        names = self.parameters
        if names and names[-1].startswith("*"):
            last = len(names) - 1
            args = *args[:last], args[last:]
        given = dict(zip(names, args, strict=False))
        is_fit = len(args) <= len(names) and given.keys().isdisjoint(kwargs)
        if not is_fit or not set(names).issuperset(kwargs):
            return None
        return given | dict(kwargs)

    def is_of(self, methods: Mapping[str, Sequence[str]]) -> bool:
        """Whether workers with these methods have the method of this call.

        Args:
            methods: name → names of the parameters, as from `methods_of`.

        """
        has_method = tuple(methods.get(self.method, ("",))) == self.parameters
        return has_method and methods.keys() >= set(self.besides)


@dataclass(frozen=True, slots=True)
class KnownWrite:
    """What is known of a call that is executed on the live weights."""

    label: str | None = None
    """The label of what it writes; None: `untracked-<epoch>`."""
    is_certain: bool = False
    """Whether it has written also if nothing shows it, and if it has failed."""
    is_expected: bool = False
    """Whether it has written also if nothing shows it, unless it has failed."""
    failure: Callable[[Any], str | None] = _never
    """See `KnownCall.failure`."""

    @classmethod
    def of(cls, row: KnownCall, arguments: Arguments) -> KnownWrite:
        """What a row says of a call with these arguments."""
        is_certain = row.role is Role.IN_PLACE
        is_expected = row.role in (Role.VERSION, Role.PART, Role.COMPLETING)
        label = row.label_of(arguments)
        return cls(label, is_certain, is_expected, row.failure)

    def failed(self, replies: object) -> EngineFault | None:
        """Why the replies of the ranks mean that the call has failed; None if not."""
        each = replies if isinstance(replies, list) else []
        why = next(filter(None, map(self.failure, each)), None)
        return None if why is None else EngineFault(why)


UNKNOWN = KnownWrite()
"""Of a call that the table does not have."""


def located(step: str) -> tuple[ModuleType, str] | None:
    """The module of one of `KnownCall.load_steps`, and the function's name in it.

    Returns:
        None: this release of the framework has no such function, or its module cannot
        be imported.

    """
    module, _, name = step.partition(":")
    try:
        found = import_module(module)
    except ImportError:
        return None
    except Exception as error:
        logger.warning("%s cannot be imported: %s", module, error)
        return None
    return (found, name) if callable(getattr(found, name, None)) else None


def methods_of(worker: type, calls: Iterable[KnownCall]) -> dict[str, list[str]]:
    """The methods of a worker class that known calls name.

    Returns:
        name → names of the parameters, without `self`.

    """
    found: dict[str, list[str]] = {}
    for name in {name for call in calls for name in (call.method, *call.besides)}:
        method = inspect.getattr_static(worker, name, None)
        if not inspect.isfunction(method):
            continue
        _, *parameters = inspect.signature(_undecorated(method)).parameters.values()
        found[name] = [
            "*" * (each.kind is each.VAR_POSITIONAL) + each.name for each in parameters
        ]
    return found


def _undecorated(method: FunctionType) -> FunctionType:
    """The function that a decorator without `functools.wraps` hides, if one does.

    NeMo-RL's decorator is one: its function takes any arguments, and holds the method.
    """
    found = [method]
    while _takes_anything(found[-1]):
        hidden = [f for f in _held(found[-1]) if inspect.isfunction(f)]
        if len(hidden) != 1 or hidden[0] in found:
            return method
        found.append(hidden[0])
    return found[-1]


def _takes_anything(function: FunctionType) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return {each.kind for each in parameters} == {VAR_POSITIONAL, VAR_KEYWORD}


def _held(function: FunctionType) -> Iterator[object]:
    """What a function's closure holds."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the cell is empty
            yield cell.cell_contents
