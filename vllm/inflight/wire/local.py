"""Backend `local`: weights from a file of this host, on disk or in memory.

`update_info` is `{"path": …}`, a safetensors file or a directory of them (with or
without an index), or `{"shm": …}`, the name of a safetensors file in POSIX
shared memory (`/dev/shm`), which is how a trainer on the same host hands a
version over without touching a disk. With `"draft": true` beside it, the tensors are
the drafter's, as its own checkpoint calls them. Selected with
`--weight-transfer-config '{"backend": "local"}'`; `/update_weights_from_disk`
works without that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vllm.inflight import upstream
from vllm.inflight.errors import Malformed
from vllm.inflight.update import drafters
from vllm.inflight.wire.engine import StagedEngine

SHARED_MEMORY = Path("/dev/shm")
INDEX = "model.safetensors.index.json"


@dataclass
class LocalInitInfo(upstream.WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class LocalUpdateInfo(upstream.WeightTransferUpdateInfo):
    """Where the tensors of this chunk are; one of the two."""

    path: str | None = None
    shm: str | None = None
    draft: bool = False

    def files(self) -> list[Path]:
        """The safetensors files named, in a fixed order; raises `Malformed`."""
        if (self.path is None) == (self.shm is None):
            raise Malformed("update_info needs 'path' or 'shm', one of the two")
        if self.shm is not None:
            if "/" in self.shm or self.shm.startswith("."):
                raise Malformed(f"'shm' must be a plain name, got {self.shm!r}")
            return [_existing(SHARED_MEMORY / self.shm)]
        assert self.path is not None
        return checkpoint_files(Path(self.path))


class LocalEngine(StagedEngine):
    """Receives from files of this host into whatever model it is given."""

    init_info_cls = LocalInitInfo
    update_info_cls = LocalUpdateInfo

    def init_transfer_engine(self, init_info: LocalInitInfo) -> None:
        """Nothing to connect to."""

    def folder_of(self, update_info: LocalUpdateInfo) -> Path | None:
        """That of several files; beside a single one anything may lie.

        None for a drafter: what it is of decides no token.
        """
        if update_info.draft:
            return None
        path = None if update_info.path is None else Path(update_info.path)
        return path if path is not None and path.is_dir() else None

    def receive_weights(self, update_info: LocalUpdateInfo) -> None:
        """Load every tensor of the files named."""
        pairs = read_files(update_info.files())
        if update_info.draft:
            pairs = ((drafters(name), tensor) for name, tensor in pairs)
        self.model.load_weights(pairs)

    def shutdown(self) -> None:
        """Nothing to close."""


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: a file, or a directory of shards."""
    if path.is_dir():
        index = path / INDEX
        if index.is_file():
            try:
                shards = sorted(
                    set(json.loads(index.read_text())["weight_map"].values())
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Malformed(f"{index} is not a checkpoint index") from error
            if any("/" in shard for shard in shards):
                raise Malformed(f"{index} names files outside its directory")
            return [_existing(path / shard) for shard in shards]
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise Malformed(f"{path} holds no .safetensors file")
        return files
    return [_existing(path)]


def read_files(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `files`; raises `Malformed` naming a file that is broken."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise Malformed(
                f"{file} is not a whole safetensors file: {error}"
            ) from error


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise Malformed(f"{path} does not exist on the engine's host")
    return path
