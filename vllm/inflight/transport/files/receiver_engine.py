"""Backend `local`: weights from files of this host, on disk or in shared memory.

`update_info` is one of these:

- `{"path": …}`: a safetensors file, or a directory of them with or without an index;
- `{"shm": …}`: the name of a safetensors file in POSIX shared memory (`/dev/shm`). A
  trainer on the same host hands a version over like this, without a disk.

With `"draft": true`, the tensors are the drafter's, under the names of its own
checkpoint. The backend is selected with
`--weight-transfer-config '{"backend": "local"}'`. `/update_weights_from_disk` works
without that.

For a CPU, a file is read tensor by tensor. For a GPU, files are read into page-locked
memory and arrive in buckets (bucket_reader.py).
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import Malformed
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.buckets.buffers import ONE_SET_BUCKETS, Buffers
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.files.allowed_paths import (
    INDEX,
    existing,
    resolved,
    shards,
)
from vllm.inflight.transport.files.bucket_reader import (
    BUCKET_BYTES,
    RUN_BYTES,
    FileReader,
)
from vllm.inflight.transport.files.safetensors_files import Stored, TensorFiles
from vllm.inflight.transport.host_threads import num_threads
from vllm.inflight.transport.waiting import WaitLimit
from vllm.inflight.update import drafters

SHARED_MEMORY = Path("/dev/shm")
ADAPTER = "adapter_model.safetensors"
"""The only file of weights where PEFT has saved an adapter."""
NUM_BUCKETS = 3
"""How many buckets of `BUCKET_BYTES` a GPU holds while files are read."""
NUM_LOOKED_AT = 2
"""How many tensors are in memory: the model may still hold the last one when it asks
for the next."""
NO_MEMORY = torch.OutOfMemoryError, torch.AcceleratorError
"""Raised if there is no GPU memory, or no host memory that can be page-locked."""

logger = upstream.init_logger(__name__)


@dataclass
class LocalInitInfo(upstream.WeightTransferInitInfo):
    """The backend `local` needs no settings."""


@dataclass
class LocalUpdateInfo(upstream.WeightTransferUpdateInfo):
    """The files of this chunk: either `path` or `shm`.

    Raises:
        ValueError: a field cannot be read; the message names it.

    """

    path: str | None = None
    shm: str | None = None
    draft: bool = False

    def __post_init__(self) -> None:
        named = [name for name in (self.path, self.shm) if name is not None]
        if len(named) != 1 or not isinstance(named[0], str) or not named[0]:
            raise ValueError("update_info needs 'path' or 'shm', one of the two")
        if self.shm is not None and ("/" in self.shm or self.shm.startswith(".")):
            raise ValueError(f"'shm' must be a plain name, got {self.shm!r:.300}")
        if not isinstance(self.draft, bool):
            raise ValueError(f"'draft' must be true or false, got {self.draft!r:.300}")

    def files(self, allowed: str) -> list[Path]:
        """The safetensors files of this chunk, in a fixed order.

        Args:
            allowed: the folders that a `path` may lead to; see allowed_paths.py. A
                file named by `shm` must lie in shared memory.

        Raises:
            Malformed: a file does not exist, or an index is invalid.
            Forbidden: a path leads out of the allowed folders.

        """
        if self.shm is not None:
            return [existing(SHARED_MEMORY / self.shm, str(SHARED_MEMORY))]
        assert self.path is not None
        return checkpoint_files(Path(self.path), allowed)


class LocalEngine(StagedEngine):
    """Loads files of this host into the model."""

    init_info_cls = LocalInitInfo
    update_info_cls = LocalUpdateInfo

    _reader: FileReader | None = None
    _opened: TensorFiles | None = None
    """The files of the chunk that is received now."""

    def init_transfer_engine(self, init_info: LocalInitInfo) -> None:
        """Do nothing: there is no connection."""

    def folder_of(self, update_info: LocalUpdateInfo) -> Path | None:
        """The folder, if `path` is one.

        For a single file it is None, because other files in its folder may be
        unrelated. For a drafter it is None, because a drafter's configuration cannot
        change a sampled token.
        """
        if update_info.draft or update_info.path is None:
            return None
        path = resolved(Path(update_info.path), self._allowed)
        resolved(path / "config.json", self._allowed)  # this file may be a symlink, too
        return path if path.is_dir() else None

    @contextlib.contextmanager
    def preview(self, update_info: LocalUpdateInfo) -> Iterator[TensorList]:
        """Open the files, and keep them open until they have been received.

        Raises:
            Malformed: a file does not exist, or is not a whole safetensors file.
            Forbidden: a path leads out of the allowed folders.

        """
        with self._files(update_info) as self._opened:
            try:
                yield self._opened.tensor_list
            finally:
                self._opened = None

    def receive_weights(self, update_info: LocalUpdateInfo) -> None:
        """Load every tensor of the chunk's files.

        Raises:
            Malformed: a file is not a whole safetensors file.
            Cancelled: the update was cancelled.

        """
        if self._opened is None:
            with self.preview(update_info):
                self.receive_weights(update_info)
        elif not self.fills_gpu or not self._load_in_buckets(self._opened):
            # Closed here: an error's traceback would keep the frame and its files open.
            num = num_threads(self.device, self.vllm_config.parallel_config)
            with contextlib.closing(read_opened(self._opened, num)) as pairs:
                self.model.load_weights(pairs)

    def _files(self, update_info: LocalUpdateInfo) -> TensorFiles:
        rename = drafters if update_info.draft else str
        return TensorFiles(update_info.files(self._allowed), rename)

    def shutdown(self) -> None:
        """Free the page-locked host memory."""
        if self._reader is not None:
            self._reader.abort("this transport was shut down")
        self._reader = None

    @property
    def fills_gpu(self) -> bool:
        """Whether the tensors of files stay on a GPU.

        With the shadow weights in host memory they do not: tensors would go to the GPU
        and back, and delay the copies of decoding.
        """
        staging = InflightConfig.of(self.vllm_config).staging
        return self.device.type == "cuda" and staging != "host"

    @property
    def _buckets(self) -> tuple[int, int]:
        """How many buckets a GPU holds while files are read, and the bytes of each."""
        if (most := self.most_bucket_bytes) is not None:
            return ONE_SET_BUCKETS, min(BUCKET_BYTES, most)
        return NUM_BUCKETS, BUCKET_BYTES

    def _load_in_buckets(self, opened: TensorFiles) -> bool:
        """Load through a `FileReader`; False if there is no memory for it."""
        limit = WaitLimit(
            math.inf, lambda: self.cancelled()
        )  # the update has a deadline
        reader = self._reader
        try:
            # Page-locking memory takes long, so the reader is kept. The memory of the
            # buckets returns to torch's cache, which gives it out again next time.
            if reader is None:
                reader = self._reader = FileReader(self.device, self._buckets[1])
            self._receive(reader, opened, limit)
        except BaseException as error:
            # The error's traceback keeps frames alive, and frames keep buckets alive.
            traceback.clear_frames(error.__traceback__)
            has_begun = reader is not None and reader.num_begun
            if has_begun or not isinstance(error, NO_MEMORY):
                raise
            logger.warning(
                "files are read without buckets, which is slower: there is no memory "
                "for %d buckets of %d bytes on the GPU, for a tensor that is larger "
                "than a bucket, or for page-locked host buffers (%s)",
                *self._buckets,
                error,
            )
            return False
        finally:
            if reader is not None:
                reader.close()
        return True

    def _receive(
        self, reader: FileReader, files: TensorFiles, limit: WaitLimit
    ) -> None:
        receiver = Receiver(reader, self._buckets[0], limit)
        reader.begin(files)
        self.model.load_weights(receiver.tensors(files.tensor_list, limit))

    @property
    def _allowed(self) -> str:
        return InflightConfig.of(self.vllm_config).allowed_paths


def checkpoint_files(path: Path, allowed: str = "") -> list[Path]:
    """The safetensors files of a checkpoint, which is a file or a directory.

    Raises:
        Malformed: there is no such file, or the index is invalid.
        Forbidden: a path leads out of the allowed folders.

    """
    path = resolved(path, allowed)
    if not path.is_dir():
        return [existing(path, allowed)]
    if (path / INDEX).is_file():
        names = shards(existing(path / INDEX, allowed))
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if not names:
            raise Malformed(
                f"{path} holds no .safetensors file",
                remedy="Give a folder with safetensors, which save_pretrained writes.",
            )
        if names == [ADAPTER]:
            raise Malformed(
                f"{path} holds an adapter, and no model",
                remedy="Load it with /v1/load_lora_adapter, or merge it into the model "
                "and save that.",
            )
    return [existing(path / name, allowed) for name in names]


def read_files(files: list[Path], num_threads: int = 1) -> Generator[Pair]:
    """Every tensor of `files`; raises `Malformed`, which names a broken file."""
    with TensorFiles(files) as opened:
        yield from read_opened(opened, num_threads)


def read_opened(opened: TensorFiles, num_threads: int = 1) -> Generator[Pair]:
    """Every tensor of open files; raises `Malformed` as `read_files` does.

    The memory of a tensor without views is reused for later tensors. A large tensor is
    read by `num_threads` threads in parallel.
    """
    with ThreadPoolExecutor(num_threads, "inflight-read") as readers:
        share = readers.map if num_threads > 1 else None
        tensor_list = opened.tensor_list
        facts = zip(
            tensor_list.names,
            tensor_list.dtypes,
            tensor_list.shapes,
            tensor_list.sizes,
            opened.stored,
            strict=True,
        )
        slots = Buffers(NUM_LOOKED_AT, 0, torch.device("cpu"))
        for number, (name, dtype, shape, size, stored) in enumerate(facts):
            # Files are read, not mapped: reading a mapped page behind the end of a file
            # that was cut off kills the process.
            data = slots.take(number, size)[:size]
            _fill(data, stored, share)
            tensor = data.view(dtype).view(shape)
            del data
            yield name, tensor
            del tensor


def _fill(
    data: torch.Tensor, stored: Stored, share: Callable[..., Iterable[None]] | None
) -> None:
    """Read a tensor; a large one in runs, in parallel with `share`."""
    memory = data.numpy().data
    if share is None or len(memory) <= RUN_BYTES:
        stored.read(0, memory)
        return
    starts = range(0, len(memory), RUN_BYTES)
    runs = [memory[start : start + RUN_BYTES] for start in starts]
    for _ in share(stored.read, starts, runs):
        pass
