"""A sender of tensors in buckets: one buffer that is filled again and again.

The buffer is shared memory of the host, and a ZeroMQ socket says what is in it. verl,
ms-swift and checkpoint-engine send so, each with its own messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from tempfile import gettempdir
from typing import Any

import torch
import zmq

from vllm.inflight.transport.waiting import in_background

SIZE = 1 << 17
"""Bytes of the buffer; the largest tensor of a tiny model fits."""

Tensors = dict[str, torch.Tensor]


class Bucket:
    """The buffer, and what is in it now."""

    def __init__(self) -> None:
        self.memory = SharedMemory(create=True, size=SIZE)
        self.entries: list[dict[str, Any]] = []
        self._end = 0

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Put a tensor into the buffer; False if there is no room."""
        start = -(-self._end // 16) * 16
        end = start + tensor.nbytes
        if end > SIZE:
            return False
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        self.memory.buf[start:end] = raw.numpy().tobytes()
        entry = {"name": name, "dtype": tensor.dtype, "shape": tensor.shape}
        self.entries.append(entry | {"offset": start})
        self._end = end
        return True

    def clear(self) -> None:
        """Begin again, over the same bytes."""
        self.entries, self._end = [], 0
        self.memory.buf[:] = b"\xff" * SIZE


def buckets(bucket: Bucket, tensors: Tensors) -> Iterator[list[dict[str, Any]]]:
    """The entries of each bucket that the tensors fill, the last one too."""
    for name, tensor in tensors.items():
        if not bucket.add(name, tensor):
            yield bucket.entries
            bucket.clear()
            assert bucket.add(name, tensor), f"{name} is larger than a bucket"
    yield bucket.entries


class Sender:
    """The end of a socket that asks, as these frameworks' trainers do."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def ask(self, message: object) -> bytes:
        """Send a message; returns the answer, which has to come in time."""
        self._socket.send_pyobj(message)
        assert self._socket.poll(10_000), f"no answer to {message!r:.80}"
        return self._socket.recv()

    def tell(self, message: object) -> None:
        """Send a message that is not answered."""
        self._socket.send_pyobj(message)


@contextmanager
def sending(
    messages: Callable[[Sender], None], address: str | None = None
) -> Iterator[str]:
    """The address at which `messages` runs in a thread, with a sender."""
    address = address or f"ipc://{gettempdir()}/{secrets.token_hex(8)}.sock"
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    ended = in_background(lambda: messages(Sender(socket)))
    try:
        yield address
        ended.result(timeout=60)
    finally:
        socket.close()
        context.term()


def with_marks(tensors: Tensors) -> Callable[[Sender], None]:
    """The messages of verl and ms-swift: the buffer, then buckets, the last marked."""

    def send(sender: Sender) -> None:
        with lent() as bucket:
            sender.ask({"name": bucket.memory.name, "size": SIZE})
            num_sent = 0
            for entries in buckets(bucket, tensors):
                num_sent += len(entries)
                named = {entry["name"]: entry | {"handle": None} for entry in entries}
                is_last = num_sent == len(tensors)
                sender.ask({"bucket_meta": named, "is_last": is_last})

    return send


def with_errors(tensors: Tensors) -> Callable[[Sender], None]:
    """The messages of checkpoint-engine, which answers an error with an error."""

    def send(sender: Sender) -> None:
        with lent() as bucket:
            lending = _opened, (bucket.memory.name, SIZE, None, None, None, None, 0)
            sender.ask(lending)
            for entries in buckets(bucket, tensors):
                if answer := sender.ask(entries):
                    sender.tell(RuntimeError(answer.decode()))
                    return
            sender.ask(None)
        sender.ask(None)

    return send


def _opened(name: str, size: int, *_: object) -> torch.Tensor:
    """The buffer in the receiver's process, as a CUDA IPC handle is opened."""
    memory = SharedMemory(name=name)
    _OPEN.append(memory)
    return torch.frombuffer(memory.buf, dtype=torch.uint8)[:size]


_OPEN: list[SharedMemory] = []
"""What was opened; torch's tensors do not keep it."""


@contextmanager
def lent() -> Iterator[Bucket]:
    """A bucket whose memory is freed with the context."""
    bucket = Bucket()
    try:
        yield bucket
    finally:
        bucket.memory.close()
        bucket.memory.unlink()
