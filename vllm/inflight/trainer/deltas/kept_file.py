"""A file that keeps the last published version, also while no trainer runs.

Deltas are applied in place, so a trainer that is killed may leave a mixture of two
versions. Therefore nothing that the file says of itself is believed: its tensors are
read and digested. A delta starts from it only if an engine serves just that content.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open

from vllm.inflight.errors import ConfigError
from vllm.inflight.trainer.deltas.published import (
    PublishedVersion,
    digests_of,
    tensors_of_file,
)
from vllm.inflight.trainer.snapshot import BLOCK_BYTES, Snapshot
from vllm.inflight.update import Manifest, TensorSpec

logger = logging.getLogger(__name__)


class KeptFile:
    """The file of one publisher; a lock keeps others away from it.

    Args:
        path: of the file, which need not exist.

    Raises:
        ConfigError: its directory does not exist.

    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ConfigError(f"there is no directory {path.parent} for delta_file")
        self._path = path
        self._closing: weakref.finalize[[IO[bytes]], KeptFile] | None = None
        """Closes the open file, which has the lock; None: none is open."""

    def read(self) -> PublishedVersion | None:
        """The version in the file; None if there is none that can be read.

        Raises:
            ConfigError: another publisher has the file.

        """
        try:
            handle = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return None
        owner = os.fdopen(handle, "r+b", buffering=0)
        self._lock(owner)
        try:
            with safe_open(self._path, framework="pt"):
                pass  # the header is one, and the file has all bytes
            tensors = tensors_of_file(owner)
        except (
            *(SafetensorError, KeyError, ValueError, OSError),
            RuntimeError,  # a tensor that does not begin where its elements may
        ) as error:
            _close(owner)
            logger.warning(
                "%s keeps no version that can be read: %s", self._path, error
            )
            return None
        self._hold(owner)
        digests = digests_of(list(tensors.items()))
        specs = {
            name: TensorSpec(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                digest.hex(),
            )
            for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
        }
        return PublishedVersion(tensors, specs)

    def take(self, snapshot: Snapshot, manifest: Manifest) -> PublishedVersion:
        """Copy a whole version into the file, in the place of what it had.

        Args:
            snapshot: with all tensors.
            manifest: with their digests.

        Raises:
            ConfigError: another publisher has the file.
            OSError: there is no room for it.

        """
        if self._closing is None and self._path.exists():
            with open(self._path, "r+b", buffering=0) as other:
                self._lock(other)
        handle, name = tempfile.mkstemp(
            prefix=f"{self._path.name}.", suffix=".part", dir=self._path.parent
        )
        owner = os.fdopen(handle, "r+b", buffering=0)
        try:
            self._lock(owner)
            with open(snapshot.file, "rb", buffering=0) as source:
                shutil.copyfileobj(source, owner, BLOCK_BYTES)
            Path(name).replace(self._path)
        except BaseException:
            owner.close()
            Path(name).unlink(missing_ok=True)
            raise
        self.close()
        self._hold(owner)
        return PublishedVersion(tensors_of_file(owner), manifest.tensors)

    def close(self) -> None:
        """Let other publishers have the file."""
        if self._closing is not None:
            self._closing()
        self._closing = None

    def _hold(self, owner: IO[bytes]) -> None:
        """Have this file with its lock, until it is closed or this object is gone."""
        self._closing = weakref.finalize(self, _close, owner)

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(
                f"{self._path} is in use by another publisher; give each a delta_file "
                "of its own"
            ) from None


def _close(file: IO[bytes]) -> None:
    # Mapped memory has the same lock, and may be in use somewhere.
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()
