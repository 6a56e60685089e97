"""The audit of an update on a GPU: digests and non-finite values, read back once.

Asking a GPU for a number waits for it. So the sums of every tensor stay where they are
computed until the verdict, and one copy brings them all.
"""

from __future__ import annotations

import torch

from vllm.inflight import ops
from vllm.inflight._digest_reference import COUNT, PLACE, page_key

ROWS = 1024
PAGE_BYTES = 2**35


class Audit:
    """Sums of tensors on one device, in the order in which they were added."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] = []
        self._num_bytes: list[int] = []
        self._pages: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Enqueue the sums of `tensor` on the current stream."""
        from vllm.inflight._digest_triton import add_sums

        if tensor.nbytes > PAGE_BYTES:
            raise ValueError(
                f"{name} has {tensor.nbytes} bytes; the digest of a GPU tensor is "
                f"defined up to {PAGE_BYTES}"
            )
        row = len(self._names)
        if row == ROWS * len(self._pages):
            self._pages.append(self._page())
        mask, width = nonfinite_bits(tensor.dtype)
        sums = self._pages[-1][row % ROWS]
        add_sums(tensor, page_key(0), mask, width, sums)
        self._names.append(name)
        self._num_bytes.append(tensor.nbytes)

    def results(self) -> list[tuple[str, ops.Digest, int]]:
        """(name, digest, number of non-finite values) of every tensor."""
        rows = [row for page in self._pages for row in page.tolist()]
        return [
            (
                name,
                ops.Digest(
                    (rows[i][0] + COUNT * size) % 2**64,
                    (rows[i][1] + PLACE * size * size) % 2**64,
                ),
                rows[i][2],
            )
            for i, (name, size) in enumerate(
                zip(self._names, self._num_bytes, strict=True)
            )
        ]

    def _page(self) -> torch.Tensor:
        return torch.zeros(ROWS, 3, dtype=torch.int64, device=self._device)


def warm(device: torch.device, dtypes: set[torch.dtype]) -> None:
    """Compile the kernels for `dtypes` now rather than beside decoding."""
    audit = Audit(device)
    for dtype in sorted(dtypes, key=str):
        audit.add(str(dtype), torch.zeros(8, device=device).to(dtype))
    audit.results()


def nonfinite_bits(dtype: torch.dtype) -> tuple[int, int]:
    """Mask and width of an element, as the kernel wants them; (0, 0) for integers."""
    mask = ops.NONFINITE_MASKS.get(dtype)
    if mask is None:
        return 0, 0
    width = dtype.itemsize
    # The kernel looks at 4 bytes at a time; an infinity of 8 shows in its upper half.
    return (mask >> 32 if width == 8 else mask & ((1 << 8 * width) - 1)), width
