"""Numbers that are read from a GPU beside decoding."""

from __future__ import annotations

import torch


class Arriving:
    """A tensor on its way to the host.

    The host waits for this copy alone, and not for what the GPU does after it. A copy
    into memory that is not page-locked would hold the driver until it ends: the thread
    that decodes could launch nothing meanwhile.

    Args:
        tensor: on any device. A GPU copies it on its current stream.

    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # Torch takes page-locked memory, since the copy does not block.
        self._here = tensor.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tensor(self) -> torch.Tensor:
        """The tensor, once it is here. One of the host is not copied."""
        if self._event is not None:
            self._event.synchronize()
        return self._here


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host; other threads can launch work on the GPU meanwhile."""
    return Arriving(tensor).tensor()
