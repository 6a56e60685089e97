"""Weights of a checkpoint-engine, whose processes share the GPUs of the ranks.

Moonshot's checkpoint-engine has one process for each GPU. The process lends one buffer
in GPU memory to the rank of that GPU, and fills it again and again. A ZeroMQ socket of
the host carries the messages (as of release 0.4):

| message, pickled | answer |
|---|---|
| the buffer: torch's arguments of an exported tensor | empty, or an error |
| a list: name, shape, dtype and first byte of each tensor in the buffer | the same |
| None: the end | empty |
| an error: another rank has failed | none |

An empty answer means that the buffer may be filled again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import zmq

from vllm.inflight import upstream
from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.cuda_ipc import torch_exports
from vllm.inflight.transport.cuda_ipc.receiver_engine import (
    EXPORTED_BUCKET_BYTES,
    IpcEngine,
    IpcInitInfo,
    IpcUpdateInfo,
)
from vllm.inflight.transport.cuda_ipc.torch_exports import TorchExport
from vllm.inflight.transport.sglang import safe_unpickler
from vllm.inflight.transport.waiting import WaitLimit

SCHEME = "ipc://"
TIMEOUT_S = 600.0
"""The longest wait for a message. The sender may read a checkpoint in between."""
FAREWELL_MS = 1000
"""How long a closed socket still tries to send its last answer."""


@dataclass
class ZmqUpdateInfo(upstream.WeightTransferUpdateInfo):
    """Where the processes of a checkpoint-engine listen.

    Raises:
        ValueError: a field cannot be read; the message names it.

    """

    zmq_handles: dict[str, str]
    """For the UUID of each GPU: the address of a socket, `ipc://…`."""

    def __post_init__(self) -> None:
        handles = self.zmq_handles
        if not isinstance(handles, dict) or not handles:
            raise ValueError("'zmq_handles' must be an object: UUID of a GPU → address")
        for gpu, address in handles.items():
            if not isinstance(address, str) or not address.startswith(SCHEME):
                raise ValueError(
                    f"the address of {gpu!r:.80} must begin with {SCHEME}, because GPU "
                    f"memory is lent within a host; got {address!r:.300}"
                )


class Lender:
    """The socket to one process of a checkpoint-engine."""

    def __init__(self, address: str, limit: WaitLimit) -> None:
        self._limit = limit
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        self._owes_answer = False
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise Malformed(f"{address!r:.300} cannot be connected: {error}") from None

    def messages(self) -> Iterator[TorchExport | list[Any] | str | None]:
        """The messages; the one before is answered when the next one is taken.

        Raises:
            Malformed: a message cannot be read.
            TransferFault: no message came in time.
            Cancelled: the wait was cancelled.

        """
        while True:
            self.answer()
            self._limit.until(
                lambda: bool(self._socket.poll(0)), "the checkpoint-engine"
            )
            data = self._socket.recv()
            self._owes_answer = True
            yield safe_unpickler.message(data, "a message of the checkpoint-engine")

    def answer(self, error: str = "") -> None:
        """Answer the last message, unless that was done."""
        if self._owes_answer:
            self._owes_answer = False
            self._socket.send_string(error)

    def close(self) -> None:
        """Close the socket; the last answer is still sent."""
        self._socket.close()
        self._context.term()


@contextmanager
def lender(address: str, limit: WaitLimit) -> Iterator[Lender]:
    """A context with a `Lender`, who is told if it fails."""
    made = Lender(address, limit)
    try:
        yield made
        made.answer()
    except BaseException as error:
        made.answer(f"{type(error).__name__}: {error}")
        raise
    finally:
        made.close()


class CheckpointEngine(IpcEngine):
    """Receives the tensors that a checkpoint-engine puts into its buffer."""

    update_info_cls = ZmqUpdateInfo

    def receive_weights(self, update_info: ZmqUpdateInfo) -> None:
        """Load all tensors of an update.

        Raises:
            Malformed: this worker has no GPU, no process lends to its GPU, or a message
                cannot be read.
            TransferFault: the sender has given up or is silent, or this GPU cannot
                reach its memory.
            Cancelled: the update was cancelled.

        """
        self.init_transfer_engine(
            IpcInitInfo(
                bucket_bytes=EXPORTED_BUCKET_BYTES, num_buckets=2, timeout_s=TIMEOUT_S
            )
        )
        try:
            address = update_info.zmq_handles.get(self.gpu)
            if address is None:
                raise Malformed(
                    f"zmq_handles has no address for {self.gpu}, the GPU of this worker"
                )
            with lender(address, WaitLimit(TIMEOUT_S, self._is_cancelled)) as sender:
                self._receive_from(sender)
        finally:
            self.shutdown()

    @property
    def gpu(self) -> str:
        """The UUID of this worker's GPU, as the driver's tools print it."""
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def _receive_from(self, sender: Lender) -> None:
        messages = sender.messages()
        buffer = next(messages)
        if not isinstance(buffer, TorchExport) or buffer.dtype != torch.uint8:
            raise Malformed("the checkpoint-engine has lent no buffer of bytes")
        counters = [buffer.counter] if buffer.counter else []
        try:
            for message in messages:
                if message is None:
                    return
                if not isinstance(message, list):
                    raise TransferFault(f"the checkpoint-engine gave up: {message}")
                info = torch_exports.update_info(_tensors(message, buffer))
                super().receive_weights(IpcUpdateInfo(**info))
                # What fills the buffer again ends before its message is sent.
                buffer = replace(buffer, event=None)
            raise AssertionError("messages end with None")
        finally:
            torch_exports.release(counters)


def _tensors(entries: list[Any], buffer: TorchExport) -> dict[str, TorchExport]:
    """The tensors in a buffer, by name; raises `Malformed`."""
    tensors: dict[str, TorchExport] = {}
    for entry in entries:
        try:
            name, dtype = str(entry["name"]), entry["dtype"]
            shape, start = tuple(entry["shape"]), entry["offset"]
            end = start + math.prod(shape) * dtype.itemsize
            if name in tensors or not 0 <= start <= end <= buffer.num_bytes:
                raise ValueError
            tensors[name] = buffer.cut(start, end, dtype, shape)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Malformed(
                f"{entry!r:.300} is no tensor in a buffer of {buffer.num_bytes} bytes, "
                "or has come before"
            ) from error
    return tensors
