"""A fetcher: a group of one, which nobody sends to, and which gets what it receives."""

from __future__ import annotations

import torch

from vllm.inflight.wire.meeting import Terms


class Fetcher:
    """What those have in common that implement `Group` by copies on a stream.

    Args:
        terms: of its buckets.
        device: where to.

    """

    def __init__(self, terms: Terms, device: torch.device) -> None:
        self.terms = terms
        self.device = device
        self.ended: str | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        """Let what is copied from now on come after the current stream's work."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(current)

    def abort(self, reason: str) -> None:
        """Fetch no more; what is under way ends by itself, and is waited for."""
        if self.ended is None:
            self.ended = reason
            self._end()

    def close(self) -> None:
        """Wait for what is under way: its source may be gone after this."""
        self._end()

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
