"""The sending end: a bucket is packed while earlier buckets are being sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vllm.inflight.transport.buckets.buffers import bucket_buffers
from vllm.inflight.transport.buckets.plan import extent, plan
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.group import Group, Pending
from vllm.inflight.transport.waiting import WaitLimit


class Sender:
    """The trainer's end of a group; the constructor is collective."""

    def __init__(self, group: Group, num_buckets: int, limit: WaitLimit) -> None:
        self.group = group
        self._slots = bucket_buffers(group, num_buckets, limit)

    def send(
        self, tensor_list: TensorList, tensors: Iterable[Pair], limit: WaitLimit
    ) -> None:
        """Send the tensors of a tensor list. On return, the tensors may change again.

        The current stream packs the tensors, after the work that produced them there.
        So a source may reuse the memory of one tensor for the next. The workers may
        still be receiving the last bytes, so close the group only after the engines
        have answered.

        Args:
            tensor_list: the list that the engines' `update_info` has.
            tensors: (name, tensor), on any device, in the order of the list.
            limit: bounds the wait for each bucket.

        Raises:
            ValueError: the tensors differ from the list; the group was aborted.
            TransferFault: a worker died, left or stalled; the group was aborted.
            Cancelled: sending was cancelled; the group was aborted.

        """
        try:
            self._send(tensor_list, tensors, limit)
        except BaseException as error:
            self.group.abort(f"stopped sending: {error or type(error).__name__}")
            raise

    def _send(
        self, tensor_list: TensorList, tensors: Iterable[Pair], limit: WaitLimit
    ) -> None:
        terms = self.group.terms
        buckets = plan(tensor_list.sizes, terms.bucket_bytes, large=self.group.large)
        source = tensor_list.checked(tensors)
        index, data = -1, None
        in_flight: deque[Pending] = deque()
        for number, bucket in enumerate(buckets):
            if number >= self._slots.count:
                sent = number - self._slots.count
                limit.until(
                    in_flight.popleft(), f"bucket {sent + 1} of {len(buckets)} to go"
                )
            buffer = self._slots.take(number)
            for piece in bucket.pieces:
                while index < piece.tensor:
                    index, data = next(source)
                assert data is not None
                packed = buffer[piece.place : piece.place + piece.num_bytes]
                packed.copy_(data[piece.start : piece.start + piece.num_bytes])
            messages = [buffer[extent(message)] for message in bucket.messages]
            in_flight.append(self.group.broadcast(messages, limit))
        for _ in source:  # tensors without elements; also checks that none is left
            pass
        for pending in in_flight:
            limit.until(pending, "the last buckets to go")
