"""Weights of a checkpoint-engine, whose processes share the GPUs of the ranks.

Moonshot's checkpoint-engine has one process for each GPU. The process lends one buffer
in GPU memory to the rank of that GPU, and fills it again and again. A ZeroMQ socket of
the host carries the messages (read in releases 0.3.4 to 0.4.2):

| message, pickled | answer |
|---|---|
| the buffer: torch's arguments of an exported tensor | empty, or an error |
| a list: name, shape, dtype and first byte of each tensor in the buffer | the same |
| None: all has been sent | empty; the buffer is not used any more |
| None again, since 0.4: the weights shall be processed | empty |
| an error, after an answer with an error | none |

An empty answer means that the buffer may be filled again. A process waits without a
limit for each answer, and for somebody to take each message. So a socket is not closed
with the call: a thread goes on to answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import zmq

from vllm.inflight import upstream
from vllm.inflight.background import in_background
from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.cuda_ipc import torch_exports
from vllm.inflight.transport.cuda_ipc.receiver_engine import (
    EXPORTED_BUCKET_BYTES,
    IpcEngine,
    IpcInitInfo,
    IpcUpdateInfo,
)
from vllm.inflight.transport.cuda_ipc.torch_exports import Counter, TorchExport
from vllm.inflight.transport.sglang import safe_unpickler
from vllm.inflight.transport.waiting import WaitLimit

SCHEME = "ipc://"
MAX_GPUS = 64
"""Most addresses of a call: no host has more GPUs."""
TIMEOUT_S = 600.0
"""The longest wait for a message. The sender may read a checkpoint in between."""
LINGER_MS = 1000
"""How long a closed socket still tries to send its last answer."""
FAREWELL_S, POLL_MS = 30.0, 100
"""How long, and in which steps, messages are answered after a call."""

Message = TorchExport | list[Any] | str | None


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
        if len(handles) > MAX_GPUS:
            raise ValueError(
                f"'zmq_handles' has {len(handles)} addresses, and a host has at most "
                f"{MAX_GPUS} GPUs"
            )
        for gpu, address in handles.items():
            if not isinstance(address, str) or not address.startswith(SCHEME):
                raise ValueError(
                    f"the address of {gpu!r:.80} must begin with {SCHEME}, because GPU "
                    f"memory is lent within a host; got {address!r:.300}"
                )


class Lender:
    """The socket to one process of a checkpoint-engine."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._owes_answer = False
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close()
            raise Malformed(f"{address!r:.300} cannot be connected: {error}") from None

    def messages(self, limit: WaitLimit, counters: list[Counter]) -> Iterator[Message]:
        """The messages; the one before is answered when the next one is taken.

        Args:
            limit: bounds the wait for each message.
            counters: gets the counters of buffers.

        Raises:
            Malformed: a message cannot be read.
            TransferFault: no message came in time, or the process has ended.
            Cancelled: the wait was cancelled.

        """
        while True:
            self._answer("")
            limit.until(self._has_message, "the checkpoint-engine")
            data = self._socket.recv()
            self._owes_answer = True
            where = "a message of the checkpoint-engine"
            yield safe_unpickler.message(data, where, counters)

    def leave(self, error: str = "") -> None:
        """Go on to answer in the background, and close the socket after a while.

        Args:
            error: the answer to the last message and to all others. If it is empty, the
                process has sent everything, and one more message is answered.

        """
        in_background(lambda: self._answer_all(error), "inflight-farewell")

    def _answer_all(self, error: str) -> None:
        ends = time.monotonic() + FAREWELL_S
        try:
            self._answer(error)
            while time.monotonic() < ends and not self._monitor.poll(0):
                if self._socket.poll(POLL_MS):
                    self._socket.recv()
                    self._owes_answer = True
                    self._answer(error)
                    if not error:
                        return
        finally:
            self._close()

    def _has_message(self) -> bool:
        if self._socket.poll(0):
            return True
        if self._monitor.poll(0):
            raise TransferFault("the process of the checkpoint-engine has ended")
        return False

    def _answer(self, error: str) -> None:
        if self._owes_answer:
            self._owes_answer = False
            self._socket.send_string(error)

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


def reject(info: ZmqUpdateInfo, error: str) -> None:
    """Answer all processes with an error, in the background; for a rejected call."""
    for address in info.zmq_handles.values():
        with suppress(Malformed):
            Lender(address).leave(error)


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
        address = update_info.zmq_handles.get(self.gpu)
        if address is None:
            raise Malformed(
                f"zmq_handles has no address for {self.gpu}, the GPU of this worker"
            )
        lender = Lender(address)
        try:
            # The socket is there first: the process waits for somebody to tell it.
            self.init_transfer_engine(
                IpcInitInfo(
                    bucket_bytes=EXPORTED_BUCKET_BYTES,
                    num_buckets=2,
                    timeout_s=TIMEOUT_S,
                )
            )
            self._receive_from(lender)
        except BaseException as error:
            lender.leave(f"{type(error).__name__}: {error}")
            raise
        lender.leave()

    @property
    def gpu(self) -> str:
        """The UUID of this worker's GPU, as the driver's tools print it.

        Raises:
            Malformed: it has none.

        """
        if self.device.type != "cuda":
            raise Malformed(
                "a checkpoint-engine lends GPU memory, and this engine runs on "
                f"{self.device.type}; update from files"
            )
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def _receive_from(self, lender: Lender) -> None:
        counters: list[Counter] = []
        try:
            limit = WaitLimit(TIMEOUT_S, self._is_cancelled)
            messages = lender.messages(limit, counters)
            buffer = next(messages)
            if not isinstance(buffer, TorchExport):
                raise Malformed("the checkpoint-engine has lent no buffer")
            if buffer.dtype != torch.uint8:
                raise Malformed(f"the buffer has {buffer.dtype}, and not bytes")
            while (message := next(messages)) is not None:
                if isinstance(message, str):
                    raise TransferFault(f"the checkpoint-engine gave up: {message}")
                if not isinstance(message, list):
                    raise Malformed("the checkpoint-engine has lent a second buffer")
                info = torch_exports.update_info(_tensors(message, buffer))
                super().receive_weights(IpcUpdateInfo(**info))
                # What fills the buffer again ends before its message is sent.
                buffer = replace(buffer, event=None)
        finally:
            # Before the answer to the last message: the process then frees the buffer.
            self.shutdown()
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
