"""The sending end: a bucket is packed while those before it are on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vllm.inflight.transport.buckets.buffers import bucket_slots
from vllm.inflight.transport.buckets.plan import extent, plan
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.group import Group, Pending
from vllm.inflight.transport.waiting import WaitLimit


class Sender:
    """The trainer's end of a group; to make it is collective."""

    def __init__(self, group: Group, num_buckets: int, watch: WaitLimit) -> None:
        self.group = group
        self._slots = bucket_slots(group, num_buckets, watch)

    def send(
        self, announced: TensorList, tensors: Iterable[Pair], watch: WaitLimit
    ) -> None:
        """Send what was announced; when it returns, the tensors may change again.

        Packing is work of the current stream, so it comes after whatever produced the
        tensors there, and a source may reuse the memory of one for the next. The
        workers may still be receiving the last bytes: the group may be closed when
        their engines have answered.

        Args:
            announced: the same as in the engines' `update_info`.
            tensors: (name, tensor), on any device, in that order.
            watch: bounds the wait for each bucket.

        Raises:
            ValueError: the tensors are not those; the group was aborted.
            TransferFault: a worker died, left or stalled; likewise.
            Cancelled: likewise.

        """
        try:
            self._send(announced, tensors, watch)
        except BaseException as error:
            self.group.abort(f"stopped sending: {error or type(error).__name__}")
            raise

    def _send(
        self, announced: TensorList, tensors: Iterable[Pair], watch: WaitLimit
    ) -> None:
        terms = self.group.terms
        buckets = plan(announced.sizes, terms.bucket_bytes, large=self.group.large)
        source = announced.checked(tensors)
        index, data = -1, None
        in_flight: deque[Pending] = deque()
        for number, bucket in enumerate(buckets):
            if number >= self._slots.count:
                sent = number - self._slots.count
                watch.until(
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
            in_flight.append(self.group.broadcast(messages, watch))
        for _ in source:  # those without elements, and a check that none is left
            pass
        for pending in in_flight:
            watch.until(pending, "the last buckets to go")
