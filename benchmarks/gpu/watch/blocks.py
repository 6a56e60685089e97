"""What torch keeps of a GPU's memory since `begin`, and where in the code it was taken.

`collective_rpc` calls `begin` and `end` in the engine's process. Torch takes memory
from the driver in segments, and cuts blocks out of them. A segment with one block in
use is not given back, so what the driver tells is more than the sum of the blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch

OURS = "vllm/inflight"
"""The innermost frame of a block's stack with this in its path tells where."""

Report = dict[str, Any]
"""`segments`: stream → size of a segment → number; `blocks`: [bytes, number, where], of
the blocks in use that were taken since `begin`, most bytes first."""


def begin(worker: Any) -> None:
    """Have torch note where memory is taken; in the engine's process."""
    del worker
    torch.cuda.memory._record_memory_history(
        enabled="state", context="state", stacks="python"
    )


def end(worker: Any) -> Report:
    """What is kept now; torch goes on noting."""
    del worker
    return summed_up(torch.cuda.memory_snapshot())


def summed_up(snapshot: list[dict[str, Any]]) -> Report:
    """The report of a snapshot of torch."""
    segments: dict[str, Counter[int]] = defaultdict(Counter)
    bytes_at, number_at = Counter[str](), Counter[str]()
    for segment in snapshot:
        segments[str(segment["stream"])][segment["total_size"]] += 1
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("frames"):
                where = _where(block["frames"])
                bytes_at[where] += block["size"]
                number_at[where] += 1
    return {
        "segments": {stream: dict(sizes) for stream, sizes in segments.items()},
        "blocks": [[n, number_at[where], where] for where, n in bytes_at.most_common()],
    }


def _where(frames: list[dict[str, Any]]) -> str:
    frame = next((each for each in frames if OURS in each["filename"]), frames[0])
    file = "/".join(frame["filename"].rsplit("/", 3)[1:])
    return f"{file}, line {frame['line']}: {frame['name']}"
