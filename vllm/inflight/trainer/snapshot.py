"""A snapshot: one version of the weights as a safetensors file for engines to read.

The file is in shared memory (`/dev/shm`), or in a directory that the engines see too.
Tensors are written one after another as the source yields them. So the file is the only
copy of all weights.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import platform
import struct
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open

from vllm.inflight import ops
from vllm.inflight.errors import ConfigError, Malformed
from vllm.inflight.trainer.sources.stream import Pair
from vllm.inflight.update import Manifest, TensorSpec

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "vllm-inflight-parcel-"

HEADER_BYTES = 4 << 20
"""Space for the header, which is written last. It is enough for about 30,000
tensors."""

ALIGNMENT = 8
BLOCK_BYTES = 64 << 20
NUM_DIGEST_THREADS = 4
BATCH_BYTES = 2 << 30
"""The bytes of tensors whose digests are computed in one call, which cannot be
interrupted."""

LEFT_AFTER_S = 60.0
"""The age from which `sweep` removes an unlocked file, in seconds."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that safetensors can name and a digest can read, by safetensors' name."""


class Snapshot:
    """The tensors of one publish, in a file. The file goes when the object goes."""

    def __init__(self, file: Path, owner: IO[bytes], num_bytes: int) -> None:
        self.file = file
        self.num_bytes = num_bytes
        """The bytes of all tensors, without the header."""
        self.owner = owner
        """The open file, with a lock."""
        # The file is removed even if `remove` is never called. A forked child must not
        # remove its parent's file.
        self._removal = weakref.finalize(self, _remove, file, owner, os.getpid())

    @classmethod
    def pack(cls, pairs: Iterable[Pair], directory: Path | None = None) -> Snapshot:
        """Copy every tensor into a new file.

        Args:
            pairs: (name, tensor); a tensor may change once the next one is taken.
            directory: the directory of the file; by default shared memory.

        Raises:
            Malformed: two tensors have one name, or a tensor cannot be written.
            ConfigError: there is no such directory.
            OSError: there is no room for the file.

        """
        folder = _existing(SHARED_MEMORY if directory is None else directory)
        prefix = _prefix(directory)
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=".part", dir=folder)
        part = Path(name)
        owner = os.fdopen(handle, "r+b", buffering=0)
        try:
            fcntl.flock(
                owner, fcntl.LOCK_EX
            )  # the lock keeps `sweep` from removing the file
            num_bytes = write_tensors(owner, pairs)
            file = part.with_suffix(".safetensors")
            part.rename(file)
        except BaseException as error:
            owner.close()
            part.unlink()
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise OSError(
                    errno.ENOSPC,
                    f"{folder} is too small for a snapshot of the weights; enlarge it "
                    "(docker run --shm-size), publish with wire='disk', or with "
                    "delta='off', which keeps no version between publishes",
                ) from error
            raise
        return cls(file, owner, num_bytes)

    @property
    def update_info(self) -> dict[str, str]:
        """The place of the file, as `update_info` of the backend `local`."""
        if self.file.parent == SHARED_MEMORY:
            return {"shm": self.file.name}
        return {"path": str(self.file)}

    @property
    def specs(self) -> list[tuple[str, list[int], str]]:
        """Name, shape and torch's dtype name of every tensor."""
        dtypes = {name: str(d).removeprefix("torch.") for d, name in DTYPES.items()}
        return [
            (name, entry["shape"], dtypes[entry["dtype"]])
            for name, entry in self.header()[0].items()
        ]

    def rename(self, name_map: Mapping[str, str]) -> None:
        """Rename tensors in the file; names that `name_map` lacks stay.

        Raises:
            Malformed: two tensors would have one name.

        """
        header, size = self.header()
        renamed: dict[str, Any] = {}
        for name, entry in header.items():
            if (to := name_map.get(name, name)) in renamed:
                raise Malformed(f"two tensors of the source are called {to!r}")
            renamed[to] = entry
        _write_header(self.owner, renamed, size)

    def header(self) -> tuple[dict[str, Any], int]:
        """The entries of the file's header, and the header's size in bytes."""
        return header_of(self.owner)

    def manifest(
        self,
        *,
        step: int | None = None,
        digests: bool = True,
        go_on: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """The manifest of the file, which is read back for it.

        Args:
            step: the trainer's step number.
            digests: whether to compute the digest of every tensor.
            go_on: called every few GiB; it may raise to stop this.

        """
        with safe_open(self.file, framework="pt") as opened:
            named = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        values = list(named.values())
        found: list[str | None] = [None] * len(values)
        if digests:
            found = []
            for some in _batches(values):
                go_on()
                digests_of_some = ops.digest(some, num_threads=NUM_DIGEST_THREADS)
                found += [one.hex() for one in digests_of_some]
        return Manifest.of(
            (
                TensorSpec(name, tuple(t.shape), _dtype_name(t), one)
                for (name, t), one in zip(named.items(), found, strict=True)
            ),
            step=step,
        )

    def remove(self) -> None:
        """Remove the file. An engine that has opened it can read on."""
        self._removal()


def header_of(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file's header, and the header's size in bytes."""
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    return json.loads(file.read(length)), 8 + length


def mapped(file: IO[bytes]) -> mmap.mmap:
    """A file in memory; what is written there is in the file."""
    memory = mmap.mmap(file.fileno(), 0)
    # A child that was forked would keep the memory, or change it.
    if hasattr(mmap, "MADV_DONTFORK"):  # on Linux
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def sweep(prefix: str | None = None, directory: Path | None = None) -> None:
    """Remove files of killed processes; by default snapshots.

    A living owner holds a lock on its file, which other containers see too.

    Args:
        prefix: the prefix of the file names.
        directory: the directory of the files; by default shared memory. Hosts may
            share a directory, and locks of other hosts may not be visible. So only
            files of this host are removed there.

    """
    folder = SHARED_MEMORY if directory is None else directory
    for file in folder.glob((prefix or _prefix(directory)) + "*"):
        try:
            with open(file, "rb", opener=_at_once) as opened:
                # A new file is not locked yet.
                if time.time() - file.stat().st_mtime > LEFT_AFTER_S:
                    # A shared lock: on NFS an exclusive one needs a writable file.
                    fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    file.unlink()
        except OSError:
            continue  # the file is locked, gone, or of another user


def _prefix(directory: Path | None) -> str:
    """The prefix of snapshot names; in a directory, it contains a hash of the host."""
    if directory is None:
        return PREFIX
    boot = Path("/proc/sys/kernel/random/boot_id")  # of Linux
    which = boot.read_text().strip() if boot.exists() else uuid.getnode()
    host = f"{platform.node()} {which}".encode()
    return f"{PREFIX}{hashlib.blake2b(host, digest_size=6).hexdigest()}-"


def _at_once(path: str, flags: int) -> int:
    """Open a file without blocking, because it may be a pipe of another user."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _remove(file: Path, owner: IO[bytes], pid: int) -> None:
    owner.close()
    if os.getpid() == pid:
        file.unlink(missing_ok=True)


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(
            f"there is no directory {folder}; publish with wire='disk' and a "
            "directory= that the engines see under the same path"
        )
    return folder.resolve()


def write_tensors(file: IO[bytes], pairs: Iterable[Pair]) -> int:
    """Write a safetensors file, tensor by tensor; returns the bytes of all tensors."""
    header: dict[str, dict[str, object]] = {}
    odd: list[Pair] = []
    end = 0

    def append(name: str, tensor: torch.Tensor) -> None:
        nonlocal end
        flat = tensor.cpu().contiguous().resolve_neg().reshape(-1)
        _write_all(file, flat.view(torch.uint8).numpy().data)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes

    names: set[str] = set()
    file.seek(HEADER_BYTES)
    for name, tensor in pairs:
        check_tensor(name, tensor, names)
        names.add(name)
        if tensor.nbytes % ALIGNMENT:
            odd.append((name, tensor.clone()))  # the source may reuse its memory
        else:
            append(name, tensor)
    # Odd sizes come last, the widest elements first, so that all tensors are aligned.
    for name, tensor in sorted(odd, key=lambda pair: -pair[1].element_size()):
        append(name, tensor)
    _write_header(file, header, HEADER_BYTES)
    return end


def _write_header(file: IO[bytes], header: Mapping[str, Any], room: int) -> None:
    """Write the header before byte `room`; moves the tensors if it needs more."""
    text = json.dumps(header).encode()
    size = max(room, -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT)
    _shift(file, room, size - room)
    file.seek(0)
    _write_all(file, memoryview(struct.pack("<Q", size - 8) + text.ljust(size - 8)))


def check_tensor(name: str, tensor: torch.Tensor, names: Container[str]) -> None:
    """Raise `Malformed` if a tensor has no plain content, or a name of `names`."""
    if name in names:
        raise Malformed(f"two tensors of the source are called {name!r}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else tensor.layout
        raise Malformed(f"{name!r} is a {kind} tensor and has no plain content")
    if tensor.dtype not in DTYPES:
        raise Malformed(f"{name!r} has dtype {tensor.dtype}, which cannot be sent")
    if not ops.has_memory(tensor):
        raise Malformed(
            f"{name!r} has no memory of its own; gather it before it is sent"
        )


def _shift(file: IO[bytes], start: int, by: int) -> None:
    """Move all bytes from `start` on by `by` bytes, beginning with the last block."""
    position = file.seek(0, os.SEEK_END) if by else start
    while position > start:
        block = max(start, position - BLOCK_BYTES)
        file.seek(block)
        moved = file.read(position - block)
        file.seek(block + by)
        _write_all(file, memoryview(moved))
        position = block


def _write_all(file: IO[bytes], data: memoryview) -> None:
    while data:  # one write call writes at most 2 GiB
        data = data[file.write(data) :]


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, in lists of about `BATCH_BYTES`, or of one tensor."""
    batch: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        batch.append(tensor)
        num_bytes += tensor.nbytes
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
