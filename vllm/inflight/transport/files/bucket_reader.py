"""A file reader: tensors of files go to the GPU through page-locked host memory.

    files -> host buffers     threads read runs of a bucket in parallel
    host buffers -> buckets   the GPU's copy engines, on a stream of their own

Two host buffers take turns: one is filled while the other is copied to the GPU. So the
staging thread waits for neither, and computes digests and samples on the GPU. On a CPU,
the same is done without page-locked memory and without streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

import torch

from vllm.inflight.transport.buckets.plan import Bucket, Piece, extent, plan
from vllm.inflight.transport.files.safetensors_files import Stored, TensorFiles
from vllm.inflight.transport.group import LARGE, CopyGroup, Pending, Terms, group_ended
from vllm.inflight.transport.waiting import WaitLimit

PEERS = 2
"""The `world_size` of the terms: a worker and its files."""
BUCKET_BYTES = 128 << 20
NUM_HOST_BUFFERS = 2
NUM_THREADS = 8
"""How many threads read. One thread is slower than a disk, and much slower than the
page cache."""
RUN_BYTES = 8 << 20
"""The bytes that a thread reads at a time; a multiple of the alignment."""


class CopyEvent(Protocol):
    """The end of some copies; a `torch.cuda.Event` is one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CopiesEnded:
    """Implements `CopyEvent` for copies that have ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(slots=True)
class HostBuffer:
    """Host memory that files are read into."""

    data: torch.Tensor
    """uint8 [bucket_bytes]."""
    copied: CopyEvent = field(default_factory=CopiesEnded)
    """The end of the last copies from this buffer."""


class FileReader(CopyGroup):
    """Implements `Group` with one rank: `broadcast` reads the next bucket from files.

    Args:
        device: the device that buckets are copied to.
        bucket_bytes: the size of a bucket and of a host buffer; a multiple of 256. The
            host buffers are allocated here and kept.

    Raises:
        torch.AcceleratorError: the host has no more memory that can be page-locked.

    """

    large = LARGE

    def __init__(self, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> None:
        terms = Terms(wire="files", world_size=PEERS, bucket_bytes=bucket_bytes)
        super().__init__(terms, device)
        is_pinned = self._stream is not None
        self._hosts = cycle(
            [_host_buffer(bucket_bytes, is_pinned) for _ in range(NUM_HOST_BUFFERS)]
        )
        self.num_begun = 0
        """How many buckets of the current files were begun."""
        self._stored: Sequence[Stored] = ()
        self._buckets: Iterator[Bucket] = iter(())
        self._filler: ThreadPoolExecutor | None = None
        """A single thread, so that buckets are filled in order."""
        self._readers: ThreadPoolExecutor | None = None

    def begin(self, files: TensorFiles) -> None:
        """Read these files next, bucket by bucket. Keep them open until `close`."""
        self.close()
        self.ended = None
        self.num_begun = 0
        self._stored = files.stored
        sizes = files.tensor_list.sizes
        self._buckets = iter(plan(sizes, self.terms.bucket_bytes, large=self.large))
        self._filler = ThreadPoolExecutor(1, "inflight-fill", self._use_device)
        self._readers = ThreadPoolExecutor(NUM_THREADS, "inflight-read")

    def broadcast(self, buffers: Sequence[torch.Tensor], limit: WaitLimit) -> Pending:
        """Begin to read the next bucket, each message into one of `buffers`.

        The result raises `Malformed` if a file ends too early.
        """
        del limit  # enqueueing does not wait
        bucket = next(self._buckets, None)
        if bucket is None:
            return CopiesEnded().query  # the test broadcast, before any files
        if self.ended is not None:
            raise group_ended(self.ended)
        assert self._filler is not None
        self.num_begun += 1
        self.follow()
        filled = self._filler.submit(self._fill, bucket, buffers)

        def ready() -> bool:
            if self.ended is not None:
                raise group_ended(self.ended)
            return filled.done() and filled.result().query()

        return ready

    def close(self) -> None:
        """Wait for reads and copies; then files and buffers may be closed and freed."""
        super().close()
        self._buckets = iter(())
        self.num_begun = 0

    def _end(self) -> None:
        if self._filler is not None and self._readers is not None:
            # The filler's queue is cancelled first, or it would submit more reads.
            self._filler.shutdown(wait=False, cancel_futures=True)
            self._readers.shutdown(cancel_futures=True)
            self._filler.shutdown()
        super()._end()

    def _use_device(self) -> None:
        # A new thread uses the first GPU, and would open a context there.
        if self._stream is not None:
            torch.cuda.set_device(self.device)

    def _fill(self, bucket: Bucket, buffers: Sequence[torch.Tensor]) -> CopyEvent:
        """Read a bucket into a host buffer, and enqueue the copies of its messages."""
        assert self._readers is not None
        host = next(self._hosts)
        host.copied.synchronize()  # until then, copies read this buffer
        data = host.data.numpy().data
        for _ in self._readers.map(lambda run: self._read(run, data), _runs(bucket)):
            pass
        sources = [host.data[extent(message)] for message in bucket.messages]
        host.copied = self._copy(buffers, sources)
        return host.copied

    def _read(self, run: list[Piece], data: memoryview) -> None:
        for piece in run:
            into = data[piece.place : piece.place + piece.num_bytes]
            self._stored[piece.tensor].read(piece.start, into)

    def _copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> CopyEvent:
        """Enqueue copies; the sources must not change until the copies end."""
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        if self._stream is None:
            return CopiesEnded()
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._stream)
        return copied


def _host_buffer(num_bytes: int, is_pinned: bool) -> HostBuffer:
    # The device is named because the staging thread's default device is its GPU.
    data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return HostBuffer(data)


def _runs(bucket: Bucket) -> Iterator[list[Piece]]:
    """The pieces of a bucket in runs of about `RUN_BYTES`; large pieces are cut."""
    run: list[Piece] = []
    num_bytes = 0
    for piece in bucket.pieces:
        for start in range(0, piece.num_bytes, RUN_BYTES):
            taken = min(RUN_BYTES, piece.num_bytes - start)
            run.append(
                Piece(
                    piece.tensor,
                    piece.start + start,
                    piece.place + start,
                    taken,
                    piece.is_alone,
                )
            )
            num_bytes += taken
            if num_bytes >= RUN_BYTES:
                yield run
                run, num_bytes = [], 0
    if run:
        yield run
