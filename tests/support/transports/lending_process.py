"""A process of a checkpoint-engine, which lends a buffer to the rank of its GPU."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import torch
import zmq


class LendingProcess:
    """Sends as release 0.4 of checkpoint-engine does.

    Args:
        folder: for its socket.
        buffer: the bytes that it lends.

    Attributes:
        address: of its socket.
        replies: the answers to its messages.
        has_ended: whether all messages were taken, and answered where they must be.

    """

    def __init__(self, folder: Path, buffer: torch.Tensor) -> None:
        self.address = f"ipc://{folder}/checkpoint-engine.sock"
        self.replies: list[bytes] = []
        self.buffer = buffer
        self.has_ended = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.bind(self.address)
        self._thread: threading.Thread | None = None

    def send(self, *messages: Any) -> None:
        """Send these from a thread, each after the answer to the one before.

        A message is an object, bytes, or a function that makes one of both.
        """

        def run() -> None:
            for message in messages:
                made = message() if callable(message) else message
                is_raw = isinstance(made, bytes)
                self._socket.send(made if is_raw else pickle.dumps(made))
                if not isinstance(made, Exception):
                    self.replies.append(self._socket.recv())
            self.has_ended = True

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def put(self, named: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        """Fill the buffer from its beginning; the message that says so."""
        entries, start = [], 0
        self.buffer.fill_(255)
        for name, tensor in named.items():
            data = tensor.contiguous().flatten().view(torch.uint8)
            self.buffer[start : start + data.numel()] = data
            facts = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
            entries.append(facts | {"offset": start})
            start += data.numel()
        if self.buffer.is_cuda:
            torch.cuda.synchronize(self.buffer.device)
        return entries

    def close(self) -> None:
        """Wait until everything is sent, and close the socket."""
        if self._thread is not None:
            self._thread.join(timeout=60)
        if not self._context.closed:
            self._context.destroy(linger=0)
