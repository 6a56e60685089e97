"""Backend `local`: weights from a file of this host, on disk or in memory.

`update_info` is `{"path": …}`, a safetensors file or a directory of them (with or
without an index), or `{"shm": …}`, the name of a safetensors file in POSIX
shared memory (`/dev/shm`), which is how a trainer on the same host hands a
version over without touching a disk. With `"draft": true` beside it, the tensors are
the drafter's, as its own checkpoint calls them. Selected with
`--weight-transfer-config '{"backend": "local"}'`; `/update_weights_from_disk`
works without that.

On the CPU a file is read tensor by tensor. What is to be on a GPU is read into
page-locked memory and arrives in buckets (bucket_reader.py).
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
from vllm.inflight.transport.buckets.buffers import Buffers
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.files.allowed_paths import existing, read_json, resolved
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
INDEX = "model.safetensors.index.json"
NUM_BUCKETS = 3
"""Of `BUCKET_BYTES`, while files are read by way of the GPU."""
NUM_LOOKED_AT = 2
"""Tensors read one by one: who asks for the next one still has the last."""
NO_MEMORY = torch.OutOfMemoryError, torch.AcceleratorError
"""On the GPU; of the host's, that can be page-locked."""

logger = upstream.init_logger(__name__)


@dataclass
class LocalInitInfo(upstream.WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class LocalUpdateInfo(upstream.WeightTransferUpdateInfo):
    """Where the tensors of this chunk are; one of the two."""

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
        """The safetensors files named, in a fixed order.

        Args:
            allowed: the folders that a `path` may lead to; see allowed_paths.py. What
                is in
                shared memory has to lie there.

        Raises:
            Malformed: they are not there, or not what they should be.
            Forbidden: they lie elsewhere.

        """
        if self.shm is not None:
            return [existing(SHARED_MEMORY / self.shm, str(SHARED_MEMORY))]
        assert self.path is not None
        return checkpoint_files(Path(self.path), allowed)


class LocalEngine(StagedEngine):
    """Receives from files of this host into whatever model it is given."""

    init_info_cls = LocalInitInfo
    update_info_cls = LocalUpdateInfo

    _reader: FileReader | None = None
    _opened: TensorFiles | None = None
    """The files of the chunk that is being received."""

    def init_transfer_engine(self, init_info: LocalInitInfo) -> None:
        """Nothing to connect to."""

    def folder_of(self, update_info: LocalUpdateInfo) -> Path | None:
        """That of several files; beside a single one anything may lie.

        None for a drafter: what it is of decides no token.
        """
        if update_info.draft or update_info.path is None:
            return None
        path = resolved(Path(update_info.path), self._allowed)
        resolved(path / "config.json", self._allowed)  # it may be a link, too
        return path if path.is_dir() else None

    @contextlib.contextmanager
    def preview(self, update_info: LocalUpdateInfo) -> Iterator[TensorList]:
        """Open the files, and keep them open until they have been received.

        Raises:
            Malformed: one is not there, or not a whole safetensors file.
            Forbidden: one lies outside of the folders that are allowed.

        """
        with self._files(update_info) as self._opened:
            try:
                yield self._opened.announced
            finally:
                self._opened = None

    def receive_weights(self, update_info: LocalUpdateInfo) -> None:
        """Load every tensor of the files named.

        Raises:
            Malformed: one of them is not a whole safetensors file.
            Cancelled: the update is not wanted any more.

        """
        if self._opened is None:
            with self.preview(update_info):
                self.receive_weights(update_info)
        elif not self.fills_gpu or not self._load_in_buckets(self._opened):
            # Closed here: who is told of an error holds frames, and they what is open.
            num = num_threads(self.device, self.vllm_config.parallel_config)
            with contextlib.closing(read_opened(self._opened, num)) as pairs:
                self.model.load_weights(pairs)

    def _files(self, update_info: LocalUpdateInfo) -> TensorFiles:
        rename = drafters if update_info.draft else str
        return TensorFiles(update_info.files(self._allowed), rename)

    def shutdown(self) -> None:
        """Let the host's page-locked memory go."""
        if self._reader is not None:
            self._reader.abort("this transport was shut down")
        self._reader = None

    @property
    def fills_gpu(self) -> bool:
        """Whether what is read stays on a GPU.

        Not where the second set is the host's: tensors would go to the GPU and come
        back, in the way of what decoding copies.
        """
        staging = InflightConfig.of(self.vllm_config).staging
        return self.device.type == "cuda" and staging != "host"

    def _load_in_buckets(self, opened: TensorFiles) -> bool:
        """Load by a reader; whether there was memory for that."""
        watch = WaitLimit(
            math.inf, lambda: self.cancelled()
        )  # the update has a deadline
        reader = self._reader
        try:
            # To page-lock memory takes long, so it is kept. That of the buckets is
            # torch's again afterwards, who has it at hand next time.
            if reader is None:
                reader = self._reader = FileReader(self.device, BUCKET_BYTES)
            self._receive(reader, opened, watch)
        except BaseException as error:
            # Frames hold buckets, and who is told of the error holds frames.
            traceback.clear_frames(error.__traceback__)
            has_begun = reader is not None and reader.num_begun
            if has_begun or not isinstance(error, NO_MEMORY):
                raise
            logger.warning(
                "files are read without buckets, which is slower: there is no "
                "memory for %d of %d bytes on the GPU, for what is larger than "
                "one, or for some page-locked ones (%s)",
                NUM_BUCKETS,
                BUCKET_BYTES,
                error,
            )
            return False
        finally:
            if reader is not None:
                reader.close()
        return True

    def _receive(
        self, reader: FileReader, files: TensorFiles, watch: WaitLimit
    ) -> None:
        receiver = Receiver(reader, NUM_BUCKETS, watch)
        reader.begin(files)
        self.model.load_weights(receiver.tensors(files.announced, watch))

    @property
    def _allowed(self) -> str:
        return InflightConfig.of(self.vllm_config).allowed_paths


def checkpoint_files(path: Path, allowed: str = "") -> list[Path]:
    """The safetensors files of a checkpoint: a file, or a directory of shards."""
    path = resolved(path, allowed)
    if not path.is_dir():
        return [existing(path, allowed)]
    if (path / INDEX).is_file():
        names = _shards(existing(path / INDEX, allowed))
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if not names:
            raise Malformed(f"{path} holds no .safetensors file")
    return [existing(path / name, allowed) for name in names]


def _shards(index: Path) -> list[str]:
    """The names of the files that an index names."""
    body = read_json(index)
    places = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(places, dict) or not places:
        raise Malformed(f"{index} is not a checkpoint index")
    names = set()
    for name in places.values():
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise Malformed(f"{index} names files outside its directory: {name!r:.300}")
        names.add(name)
    return sorted(names)


def read_files(files: list[Path], num_threads: int = 1) -> Generator[Pair]:
    """Every tensor of `files`; raises `Malformed` naming a file that is broken."""
    with TensorFiles(files) as opened:
        yield from read_opened(opened, num_threads)


def read_opened(opened: TensorFiles, num_threads: int = 1) -> Generator[Pair]:
    """Every tensor of files that are open; raises `Malformed` as `read_files` does.

    Where nobody looks into one any more, later ones are read into its memory. What is
    large is read by `num_threads` side by side.
    """
    with ThreadPoolExecutor(num_threads, "inflight-read") as readers:
        share = readers.map if num_threads > 1 else None
        announced = opened.announced
        facts = zip(
            announced.names,
            announced.dtypes,
            announced.shapes,
            announced.sizes,
            opened.stored,
            strict=True,
        )
        slots = Buffers(NUM_LOOKED_AT, 0, torch.device("cpu"))
        for number, (name, dtype, shape, size, stored) in enumerate(facts):
            # Not where the file is mapped: to look at what was cut off ends a process.
            data = slots.take(number, size)[:size]
            _fill(data, stored, share)
            tensor = data.view(dtype).view(shape)
            del data
            yield name, tensor
            del tensor


def _fill(
    data: torch.Tensor, stored: Stored, share: Callable[..., Iterable[None]] | None
) -> None:
    """Read a tensor, in runs that are shared out if it is large."""
    memory = data.numpy().data
    if share is None or len(memory) <= RUN_BYTES:
        stored.read(0, memory)
        return
    starts = range(0, len(memory), RUN_BYTES)
    runs = [memory[start : start + RUN_BYTES] for start in starts]
    for _ in share(stored.read, starts, runs):
        pass
