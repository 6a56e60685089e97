"""Zstandard over the data of a part, where the package `zstandard` is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from vllm.inflight.errors import ConfigError, Malformed

LEVELS = range(1, 23)

REMEDY = "Install it with: pip install zstandard. Or send deltas without compression."


def require() -> None:
    """Raise ConfigError with a remedy where the package zstandard is not installed."""
    _zstandard()


def check_level(level: int | None) -> None:
    """Raise ConfigError unless this is a level of zstd that can be had, or None."""
    if level is None:
        return
    if isinstance(level, bool) or not isinstance(level, int) or level not in LEVELS:
        raise ConfigError(
            f"delta_compression is a level of zstd, {LEVELS.start} to "
            f"{LEVELS.stop - 1}, or None; got {level!r}"
        )
    require()


def compress(data: torch.Tensor, level: int) -> torch.Tensor:
    """One frame of zstd, which says how many bytes it decompresses to."""
    compressor = _zstandard().ZstdCompressor(level=level)
    return _tensor(compressor.compress(data.numpy().data))


def decompress(data: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The bytes of one frame of zstd.

    Args:
        data: the frame.
        num_bytes: the bytes that it must have decompressed; no more are allocated.

    Raises:
        Malformed: `data` is not one frame, or has another number of bytes.
        ConfigError: the package zstandard is not installed.

    """
    zstandard = _zstandard()
    frame = data.numpy().data
    try:
        # The decompressor would trust the frame, so the frame is asked first.
        announced = zstandard.get_frame_parameters(frame).content_size
        if announced != num_bytes:
            raise Malformed(
                f"the compressed data of a part announces {announced} bytes, "
                f"and its header {num_bytes}"
            )
        plain = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Malformed(f"the data of a part does not decompress: {error}") from None
    return _tensor(plain)


def _tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # A copy, because the memory of bytes must not be written.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise ConfigError(
            "deltas with zstd need the Python package zstandard", remedy=REMEDY
        ) from error
