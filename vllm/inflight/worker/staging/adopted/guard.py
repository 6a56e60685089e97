"""What a method of a worker extension may do with torch, in every thread of its call.

A `Guard` looks at operators before they run. The method's own thread has one, and each
thread that the method starts has a `ThreadGuard`. So a thread that writes on after its
method has returned is seen, and its writes are rejected.

A thread is followed if Python's `threading` starts it, and a task if a pool of
`concurrent.futures` gets it. Another thread that is older than the call, or that native
code has started, is not seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.inflight import upstream
from vllm.inflight.errors import Conflict
from vllm.inflight.worker.adopted_call import (
    AdoptedCall,
    calling,
    current,
    is_of_method,
    late,
    rejected,
    running,
)
from vllm.inflight.worker.model import registrations
from vllm.inflight.worker.staging.adopted.door import Door, write_conflict
from vllm.inflight.worker.staging.adopted.weight_memory import (
    Known,
    LateMemory,
    pairs_of,
)

T = TypeVar("T")

BY_HANDLE = {"_C_custom_ar": "", "_C": "shm_", "symm_mem": ""}
"""Namespaces and first letters of operators whose group is a handle. vLLM's groups of
ranks that decode are the only ones that use them."""

PAST_TORCH = ("pynccl_comm", "mq_broadcaster")
"""Attributes of a group, or of its communicator, that send without torch's operators.
"""

SENDING = (
    *("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv"),
    *("reduce", "scatter", "gather", "broadcast", "send", "recv", "batch_isend_irecv"),
    *("broadcast_object", "enqueue", "dequeue"),
)
"""Their methods that send or receive."""


class DecodingGroups:
    """The groups of ranks that decode, as far as several ranks do.

    Steps use these groups at the same time as a method. Ranks would meet in different
    calls, and would wait for each other or receive each other's tensors.

    Collectives of torch and of vLLM are operators. NCCL that vLLM calls past torch, and
    its queue in shared memory, are guarded by themselves.
    """

    def __init__(self) -> None:
        known = (found() for found in upstream.GROUPS.values())
        groups = [g for g in known if g is not None and g.world_size > 1]
        self._groups = [
            each for group in groups for each in (group.device_group, group.cpu_group)
        ]
        self._names = {group.unique_name for group in groups}
        self._names.update(each.group_name for each in self._groups)
        for group in groups:
            for owner in (group, group.device_communicator):
                for name in PAST_TORCH:
                    _guard(getattr(owner, name, None))

    def require_other(
        self,
        method: str,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Raise `Conflict` if an operator is a collective of these groups."""
        if self._groups and self._is_theirs(func, args, kwargs):
            name = func.__name__.partition(".")[0].strip("_")
            raise rejected(_conflict(method, name))

    def _is_theirs(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether an operator is a collective of ranks that decode."""
        namespace = func.namespace
        if namespace == "c10d":
            groups = [_group_of(each) for each in args]
            return any(group is each for group in groups for each in self._groups)
        if namespace in ("vllm", "_c10d_functional"):
            named = [e for e in (*args, *kwargs.values()) if isinstance(e, str)]
            return not self._names.isdisjoint(named)
        first = BY_HANDLE.get(namespace)
        return first is not None and func.__name__.startswith(first)


class Guard(TorchDispatchMode):
    """Rejects operators of torch that a method in this thread must not call.

    - Collectives of the groups of ranks that decode; see `DecodingGroups`.
    - Writes into parameters that are not accounted for, and reads of what was there
      before; see weight_memory.py.

    Args:
        call: of the method.
        door: of the update; it takes the writes that are accounted for.

    """

    def __init__(self, call: AdoptedCall, door: Door) -> None:
        super().__init__()
        self._method, self._door = call.method, door
        call.guard = self
        # A load may give layers other memory, and the method may have kept the old one.
        door.memory.note()
        call.decoding = self._decoding = DecodingGroups()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if written := self.written_by(func, args, named):
            return self._written(func, args, named, written)
        return func(*args, **named)

    def late_memory(self) -> LateMemory:
        """What threads of the method may not write when it has returned."""
        self._door.memory.note()
        return LateMemory(self._door.memory)

    def written_by(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Known]:
        """The parameters that an operator would write.

        Raises:
            Conflict: it is a collective that is not allowed, or it would read what must
                not be read.

        """
        self._decoding.require_other(self._method, func, args, kwargs)
        for known in self._door.memory.read_by(func, args, kwargs):
            if not self._door.may_be_read(known):
                raise rejected(_read_conflict(self._method, known))
        return self._door.memory.written_by(func, args, kwargs)

    def _written(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Known],
    ) -> Any:
        """Have the door make the copies of an operator; raises if it does more."""
        copied = [
            (self._door.memory.of(target), target, source)
            for target, source in pairs_of(func, args)
        ]
        if not copied or not all(self._door.takes(*each) for each in copied):
            why = self._door.obstacle(written[0])
            raise rejected(write_conflict(self._method, written[0], why))
        is_late = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        for known, target, source in copied:
            if known:
                self._door.write(known[0], target, source, non_blocking=is_late)
            else:
                target.copy_(source, non_blocking=is_late)
        return args[0] if isinstance(args[0], torch.Tensor) else None


class ThreadGuard(TorchDispatchMode):
    """Rejects in a thread that a method has started what a `Guard` rejects, and every
    write into a parameter.

    The thread may give tensors to `load_weights` until the method has returned. From
    then on it writes neither into the shadow weights nor into the live ones, which may
    have changed places.

    Args:
        call: of the method.

    """

    def __init__(self, call: AdoptedCall) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named, method = kwargs or {}, self._call.method
        guard: Guard | None = self._call.guard
        if guard is not None:
            for known in guard.written_by(func, args, named):
                raise rejected(
                    write_conflict(f"a thread that {method} has started", known)
                )
        else:
            self._call.decoding.require_other(method, func, args, named)
            late_memory: LateMemory = self._call.late_memory
            for written in late_memory.written_by(func, args, named):
                raise rejected(late(method, f"writes into {written}"))
        return func(*args, **named)


@functools.cache
def follow_threads() -> None:
    """Let the threads that a method starts belong to its call.

    What it hands to a pool belongs to its call, too, also if the pool is older and has
    its threads. `Thread.start` and `ThreadPoolExecutor.submit` are replaced once in a
    process, for good.
    """
    registrations.follow()
    original = threading.Thread.start

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        call = current()
        if call is not None and is_of_method():
            call.has_threads = True
            self.run = _followed(self.run, call)  # type: ignore[method-assign]
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    original_submit: Any = ThreadPoolExecutor.submit

    @functools.wraps(original_submit)
    def submit(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        call = current()
        if call is None or not is_of_method():
            return original_submit(self, fn, *args, **kwargs)
        call.has_threads = True
        # A thread that the pool starts now works for later calls, too.
        with calling(False):
            return original_submit(self, _followed(fn, call), *args, **kwargs)

    # mypy knows no such assignment
    setattr(ThreadPoolExecutor, "submit", submit)  # noqa: B010


def _followed(run: Callable[..., T], call: AdoptedCall) -> Callable[..., T]:
    guard = ThreadGuard(call)

    def followed(*args: Any, **kwargs: Any) -> T:
        with running(call), guard:
            return run(*args, **kwargs)

    return followed


def _guard(owner: Any) -> None:
    """Let the methods of `owner` that send raise in a thread that runs an extension's.

    They are replaced once, for good. Other threads notice nothing of it.
    """
    for name in SENDING if owner is not None else ():
        method = getattr(owner, name, None)
        if callable(method) and not hasattr(method, "is_guarded"):
            setattr(owner, name, _guarded(method, name))


def _guarded(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_of_method():
            raise rejected(_conflict("a method of the worker extension", name))
        return method(*args, **kwargs)

    setattr(guarded, "is_guarded", True)  # noqa: B010 (mypy knows no such attribute)
    return guarded


def _conflict(method: str, name: str) -> Conflict:
    return Conflict(
        f"{method} calls the collective {name} of a group of ranks that decode, and it "
        "runs beside their steps; start the engine with --inflight-adopt off"
    )


def _read_conflict(method: str, what: object) -> Conflict:
    return Conflict(
        f"{method} of the worker extension reads {what}, which has the content of an "
        "earlier version until this one is written, so nothing may be computed from "
        "it; start the engine with --inflight-adopt off"
    )


def _group_of(value: object) -> Any:
    """The process group that an argument of a collective is; else None."""
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return torch.distributed.ProcessGroup.unbox(value)
    except RuntimeError:  # it is another object of torch's
        return None
