"""Exports: the places of a trainer's tensors, for another process of the host.

A trainer makes them with an `Exporter`. They travel as plain data in an `update_info`,
and a worker finds the tensors with `Mappings.find`.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.cuda_ipc.driver import HANDLE_BYTES, Extent, SharedMemory

_NONCE = uuid.uuid4().hex


def host() -> str:
    """The id of this boot of this machine; all containers of a host have the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process() -> str:
    """The id of this process; a process cannot open its own handles.

    A fork has the same nonce and another process number. Processes of two containers
    may have the same number, but have other nonces.
    """
    return f"{_NONCE}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Exports:
    """The places of tensors of one process."""

    host: str
    process: str
    handles: tuple[bytes, ...]
    """The handles of the allocations that contain the tensors."""
    places: tuple[tuple[int, int], ...]
    """For each tensor: the index of its allocation, and its first byte there."""
    bases: tuple[int, ...]
    """The addresses of the allocations in the exporting process."""
    events: tuple[bytes, ...] = ()
    """Handles of the events that the tensors are ready after. A trainer of this package
    has none, because it waits before it exports."""
    held: frozenset[bytes] = frozenset()
    """Handles of other allocations that were lent before and still exist. A worker
    keeps them mapped."""
    gpus: tuple[str, ...] = ()
    """The GPU of each allocation; empty where that is not known."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], memory: SharedMemory) -> Self:
        """Export contiguous tensors, which must live until they have been read.

        Raises:
            ValueError: the memory of a tensor cannot be exported.

        """
        allocations: dict[int, int] = {}
        handles: list[bytes] = []
        places: list[tuple[int, int]] = []
        gpus: list[str] = []
        for tensor in tensors:
            if not tensor.numel():
                places.append((0, 0))
                continue
            address = tensor.data_ptr()
            try:
                with memory.at(tensor.device):
                    base = memory.extent(address).address
                    if base not in allocations:
                        allocations[base] = len(handles)
                        handles.append(memory.export(base))
                        gpus.append(memory.gpu(tensor.device))
            except TransferFault as error:
                raise ValueError(
                    f"the memory of a tensor on {tensor.device} cannot be given to "
                    f"another process ({error}); unset PYTORCH_CUDA_ALLOC_CONF="
                    "expandable_segments:True, or use inflight_nccl"
                ) from error
            places.append((allocations[base], address - base))
        return cls(
            *(host(), process(), tuple(handles), tuple(places), tuple(allocations)),
            gpus=tuple(gpus),
        )

    @classmethod
    def parse(cls, body: object, num_tensors: int) -> Self:
        """Read `plain`; raises `ValueError`, which names the invalid field."""
        if not isinstance(body, dict):
            raise ValueError("'exports' must be an object")
        for key in ("host", "process"):
            if not isinstance(body.get(key), str):
                raise ValueError(f"'exports' lacks the string {key!r}")
        handles = [_handle(text) for text in _list(body, "handles")]
        bases = [_number(base, "bases") for base in _list(body, "bases")]
        places = [_place(place, len(handles)) for place in _list(body, "places")]
        if len(bases) != len(handles):
            raise ValueError(f"{len(bases)} 'bases' for {len(handles)} 'handles'")
        if len(places) != num_tensors:
            raise ValueError(f"{len(places)} 'places' for {num_tensors} tensors")
        gpus = _list({"gpus": []} | body, "gpus")
        are_texts = all(type(gpu) is str for gpu in gpus)
        if not are_texts or len(gpus) not in (0, len(handles)):
            raise ValueError("'gpus' does not name the GPU of each of the 'handles'")
        events = [_handle(text) for text in _list({"events": []} | body, "events")]
        return cls(
            body["host"],
            body["process"],
            tuple(handles),
            tuple(places),
            tuple(bases),
            tuple(events),
            _held(body.get("held", "")),
            tuple(gpus),
        )

    @property
    def plain(self) -> dict[str, Any]:
        """The exports as JSON."""
        return {
            "host": self.host,
            "process": self.process,
            "handles": [base64.b64encode(handle).decode() for handle in self.handles],
            "places": [list(place) for place in self.places],
            "bases": list(self.bases),
            "events": [base64.b64encode(handle).decode() for handle in self.events],
            "held": base64.b64encode(b"".join(sorted(self.held))).decode(),
            "gpus": list(self.gpus),
        }


class Exporter:
    """Exports tensors of this process, and tells what it has lent before and still has.

    A trainer lends other memory at each update: it keeps the last deltas, for example.
    A worker that unmaps memory stops decoding meanwhile. So it shall unmap only what
    does not exist any more, and a trainer gets all memory back that it frees.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._lent: dict[bytes, tuple[torch.device, int]] = {}
        """Handle → device and address of an allocation."""

    def export(self, tensors: Sequence[torch.Tensor]) -> Exports:
        """Export contiguous tensors; raises as `Exports.of` does."""
        exports = Exports.of(tensors, self._memory)
        self._lent = {
            handle: where for handle, where in self._lent.items() if self._has(handle)
        }
        held = self._lent.keys() - set(exports.handles)
        for tensor, (index, _) in zip(tensors, exports.places, strict=True):
            if tensor.numel():
                where = tensor.device, exports.bases[index]
                self._lent[exports.handles[index]] = where
        return replace(exports, held=frozenset(held))

    def _has(self, handle: bytes) -> bool:
        """Whether an allocation still exists."""
        device, base = self._lent[handle]
        try:
            with self._memory.at(device):
                return self._memory.export(base) == handle
        except TransferFault:
            return False


class Mappings:
    """The allocations of other processes that this process has mapped.

    Mapping takes longer than reading, so mappings are kept between updates. When an
    update ends, the mappings are removed that it did not use, unless it has named them
    as held. So it is if it fails: a trainer that has freed memory then wants it back.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._mapped: dict[tuple[str, bytes], Extent] = {}
        self._named: set[tuple[str, bytes]] | None = None
        """What the update has used or named; None before its first call."""

    def __len__(self) -> int:
        return len(self._mapped)

    def find(self, exports: Exports, sizes: Sequence[int]) -> list[int]:
        """The address of each tensor in this process.

        Args:
            exports: the exports of a process of this host.
            sizes: the size of each tensor, in bytes.

        Raises:
            Malformed: the exports are of another host, or a tensor is not within its
                allocation.
            TransferFault: this GPU cannot reach that memory.

        """
        if exports.host != host():
            raise Malformed(
                "the trainer is on another host, whose memory cannot be mapped here; "
                "use the backend inflight_nccl"
            )
        self._name(exports.process, exports.held)
        extents = [
            self._extent(exports.process, handle, base)
            for handle, base in zip(exports.handles, exports.bases, strict=True)
        ]
        addresses = []
        for (index, start), size in zip(exports.places, sizes, strict=True):
            if not size:
                addresses.append(0)
                continue
            if index >= len(extents):
                raise Malformed(f"there is no handle {index}, only {len(extents)}")
            extent = extents[index]
            if start + size > extent.num_bytes:
                raise Malformed(
                    f"bytes {start} to {start + size} of an allocation of "
                    f"{extent.num_bytes}"
                )
            addresses.append(extent.address + start)
        return addresses

    def end_update(self) -> None:
        """Unmap what the update did not name; raises the first failure, if any.

        An update that ended before its first call has told nothing.
        """
        named, self._named = self._named, None
        if named is not None:
            self._drop(self._mapped.keys() - named)

    def close(self) -> None:
        """Unmap everything; raises the first failure, if any."""
        self._named = None
        self._drop(set(self._mapped))

    def _drop(self, keys: Iterable[tuple[str, bytes]]) -> None:
        failure: TransferFault | None = None
        for key in keys:
            try:
                self._memory.unmap(self._mapped.pop(key).address)
            except TransferFault as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _name(self, owner: str, handles: Iterable[bytes]) -> None:
        """Keep mappings of a process, as far as there are some, after the update."""
        named = self._named or set()
        self._named = named | {(owner, handle) for handle in handles}

    def _extent(self, owner: str, handle: bytes, base: int) -> Extent:
        if owner == process():
            return self._memory.extent(base)
        key = owner, handle
        self._name(owner, (handle,))
        if key not in self._mapped:
            try:
                self._mapped[key] = self._memory.map(handle)
            except TransferFault as error:
                raise TransferFault(
                    f"this GPU cannot map the trainer's memory ({error}): both must be "
                    "visible to the engine, with peer access between them; else use "
                    "the backend inflight_nccl"
                ) from error
        return self._mapped[key]


def _list(body: dict[str, Any], key: str) -> list[Any]:
    found = body.get(key)
    if not isinstance(found, list):
        raise ValueError(f"'exports' lacks the list {key!r}")
    return found


def _handle(text: object) -> bytes:
    handle = b""
    if isinstance(text, str):
        with suppress(ValueError):
            handle = base64.b64decode(text, validate=True)
    if len(handle) != HANDLE_BYTES:
        raise ValueError(
            f"a handle is {HANDLE_BYTES} bytes in base64, not {text!r:.80}"
        )
    return handle


def _held(text: object) -> frozenset[bytes]:
    """Handles that follow each other in one text."""
    octets: bytes | None = None
    if isinstance(text, str):
        with suppress(ValueError):
            octets = base64.b64decode(text, validate=True)
    if octets is None or len(octets) % HANDLE_BYTES:
        raise ValueError(
            f"'held' is handles of {HANDLE_BYTES} bytes each, in base64, not "
            f"{text!r:.80}"
        )
    starts = range(0, len(octets), HANDLE_BYTES)
    return frozenset(octets[start : start + HANDLE_BYTES] for start in starts)


def _number(value: object, key: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} in {key!r} is no number of bytes")
    return value


def _place(place: object, num_handles: int) -> tuple[int, int]:
    if not isinstance(place, list) or len(place) != 2:
        raise ValueError(f"{place!r:.80} is no place: [allocation, first byte]")
    index, start = (_number(value, "places") for value in place)
    if index >= max(1, num_handles):
        raise ValueError(f"there is no handle {index}, only {num_handles}")
    return index, start
