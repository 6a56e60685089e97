"""Tensors that a trainer lends on a worker's own GPU: they can be read where they lie.

A copy takes memory beside the weights, and so buckets are small where memory is scarce.
Where nothing has to be copied, a batch may be as large as it likes, and the thread that
stages takes fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock

import torch

from vllm.inflight.transport.buckets.reassembly import Place
from vllm.inflight.transport.buckets.receiver import Incoming
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.group import CopyGroup, group_ended

AT_ONCE_BYTES = 512 << 20
"""Bytes of a batch. What a comparison notes takes a 32nd of it."""


class LentTensors:
    """Tensors of one call: copied as `Incoming` does, or read where they lie.

    Args:
        copied: the same tensors, as they come through buckets.
        group: what copies them; once it has ended, no further batch is handed out.
        tensor_list: of the tensors.
        addresses: of the tensors, in memory of the group's device.
        in_use: locked by `lend` until `end`.
        is_mapped: whether the memory is still mapped; while `in_use` is locked nobody
            else unmaps it.

    """

    def __init__(
        self,
        copied: Incoming,
        group: CopyGroup,
        tensor_list: TensorList,
        addresses: Sequence[int],
        in_use: Lock,
        is_mapped: Callable[[], bool],
    ) -> None:
        self._copied, self._group = copied, group
        self._tensor_list, self._addresses = tensor_list, addresses
        self._in_use, self._is_mapped = in_use, is_mapped
        self._is_lent = False

    def __iter__(self) -> Iterator[Pair]:
        return self._copied

    def into(self, place: Place) -> None:
        """As of `Incoming`; tensors that are lent go nowhere."""
        self._copied.into(place)

    def lend(self) -> None:
        """Hand out the trainer's memory; call it first.

        Such a tensor may only be read, by work that is enqueued on the current stream
        before `end`. Nothing may keep it.

        Raises:
            TransferFault: the transport was shut down meanwhile.

        """
        self._in_use.acquire()
        if not self._is_mapped():
            self._in_use.release()
            raise group_ended("this transport was shut down")
        self._is_lent = True

    def batches(self) -> Iterator[list[Pair]]:
        """The tensors, in lists of those that are valid together."""
        return self._lent() if self._is_lent else self._copied.batches()

    def _lent(self) -> Iterator[list[Pair]]:
        batch: list[Pair] = []
        num_bytes = 0
        listed = self._tensor_list
        for name, dtype, shape, size, address in zip(
            *(listed.names, listed.dtypes, listed.shapes, listed.sizes),
            self._addresses,
            strict=True,
        ):
            if num_bytes and num_bytes + size > AT_ONCE_BYTES:
                yield batch
                batch, num_bytes = [], 0
            if self._group.ended is not None:
                raise group_ended(self._group.ended)
            batch.append((name, _tensor_at(address, dtype, shape, self._group.device)))
            num_bytes += size
        if batch:
            yield batch

    def end(self) -> None:
        """Wait until the current stream has read what was lent."""
        if not self._is_lent:
            return
        self._is_lent = False
        try:
            self._group.follow()
            self._group.close()
        finally:
            self._in_use.release()


def are_aligned(tensor_list: TensorList, addresses: Sequence[int]) -> bool:
    """Whether each tensor begins at a multiple of the size of its elements."""
    return not any(
        address % dtype.itemsize
        for address, dtype in zip(addresses, tensor_list.dtypes, strict=True)
    )


def _tensor_at(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """A contiguous tensor in memory that torch has not allocated."""
    tensor = torch.empty(0, dtype=dtype, device=device)
    num = torch.Size(shape).numel()
    if not num:
        return tensor.view(shape)
    storage = torch._C._construct_storage_from_data_pointer(
        address, tensor.device, num * dtype.itemsize
    )
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return tensor.set_(storage, 0, shape, strides)
