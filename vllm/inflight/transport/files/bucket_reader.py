"""A file reader: what lies in files goes to the GPU by way of page-locked memory.

    files → host buffers     threads read runs of a bucket, side by side
    host buffers → buckets   the GPU's copy engines, on a stream of its own

Two host buffers take turns: one is read into while the other is copied from. So a
thread that stages waits for neither, and what it looks at (digests, samples) lies on
the GPU. On a CPU the same is done without page-locking and without streams.
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
from vllm.inflight.transport.group import LARGE, CopyGroup, Pending, Terms, lost
from vllm.inflight.transport.waiting import WaitLimit

PEERS = 2
"""A worker and its files."""
BUCKET_BYTES = 128 << 20
NUM_HOST_BUFFERS = 2
NUM_THREADS = 8
"""That read: one alone is slower than a disk, and much slower than what is cached."""
RUN_BYTES = 8 << 20
"""What a thread reads before it asks for more; a multiple of the alignment."""


class CopyEvent(Protocol):
    """The end of some copies; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class AtOnce:
    """Implements `CopyEvent`, of copies that have ended."""

    def query(self) -> bool:
        """It has come."""
        return True

    def synchronize(self) -> None:
        """It has come."""


@dataclass(slots=True)
class HostBuffer:
    """Memory of the host that is read into: uint8 [bucket_bytes]."""

    data: torch.Tensor
    copied: CopyEvent = field(default_factory=AtOnce)
    """The end of the copies out of it."""


class FileReader(CopyGroup):
    """Implements `Group`, alone: what it is to receive, it reads.

    Args:
        device: where to.
        bucket_bytes: of a bucket, and of a host buffer, which are made here and kept
            as long as this; a multiple of 256.

    Raises:
        torch.AcceleratorError: the host has no memory that can be page-locked.

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
        """Buckets of the files that were begun last."""
        self._stored: Sequence[Stored] = ()
        self._buckets: Iterator[Bucket] = iter(())
        self._filler: ThreadPoolExecutor | None = None
        """One thread, so that buckets are filled in order."""
        self._readers: ThreadPoolExecutor | None = None

    def begin(self, files: TensorFiles) -> None:
        """Read these next, bucket by bucket; they stay open until `close`."""
        self.close()
        self.ended = None
        self.num_begun = 0
        self._stored = files.stored
        sizes = files.announced.sizes
        self._buckets = iter(plan(sizes, self.terms.bucket_bytes, large=self.large))
        self._filler = ThreadPoolExecutor(1, "inflight-fill", self._settle)
        self._readers = ThreadPoolExecutor(NUM_THREADS, "inflight-read")

    def broadcast(self, buffers: Sequence[torch.Tensor], watch: WaitLimit) -> Pending:
        """Begin to read the next bucket, each of its messages into its buffer.

        What is returned raises `Malformed` if a file ends too early.
        """
        del watch  # to enqueue does not wait
        bucket = next(self._buckets, None)
        if bucket is None:
            return AtOnce().query  # the receiver's trial, before any file is begun
        if self.ended is not None:
            raise lost(self.ended)
        assert self._filler is not None
        self.num_begun += 1
        self.follow()
        filled = self._filler.submit(self._fill, bucket, buffers)

        def ready() -> bool:
            if self.ended is not None:
                raise lost(self.ended)
            return filled.done() and filled.result().query()

        return ready

    def close(self) -> None:
        """Wait for what is under way: files may be closed and buffers go after this."""
        super().close()
        self._buckets = iter(())
        self.num_begun = 0

    def _end(self) -> None:
        if self._filler is not None and self._readers is not None:
            # What waits in line for the filler first, or it would ask for more reads.
            self._filler.shutdown(wait=False, cancel_futures=True)
            self._readers.shutdown(cancel_futures=True)
            self._filler.shutdown()
        super()._end()

    def _settle(self) -> None:
        # A thread begins on the first GPU, and would open a context there.
        if self._stream is not None:
            torch.cuda.set_device(self.device)

    def _fill(self, bucket: Bucket, buffers: Sequence[torch.Tensor]) -> CopyEvent:
        """Read a bucket and enqueue the copies of its messages."""
        assert self._readers is not None
        host = next(self._hosts)
        host.copied.synchronize()  # it must not be read into before that
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
        """Enqueue copies from the host; a source stays as it is until their end."""
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        if self._stream is None:
            return AtOnce()
        copied = torch.cuda.Event(blocking=True)
        copied.record(self._stream)
        return copied


def _host_buffer(num_bytes: int, is_pinned: bool) -> HostBuffer:
    # The thread that stages makes tensors on its GPU where it does not say otherwise.
    data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return HostBuffer(data)


def _runs(bucket: Bucket) -> Iterator[list[Piece]]:
    """The pieces of a bucket in runs of about `RUN_BYTES`, large ones cut up."""
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
