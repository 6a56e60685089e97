"""The attributes that we set on objects of upstream, as records.

Nothing here changes upstream. `make upstream V=...` checks every record on another
release: upstream must not have an attribute of that name. Code reaches our objects by
`attached.py`, and a test lets no file set an attribute in another way.
"""

from __future__ import annotations

from vllm.inflight.patch.record import Attribute

_OURS = "vllm.inflight"

ATTRIBUTES = [
    Attribute(
        target="vllm.v1.request:Request",
        holds=f"{_OURS}.engine.scheduling.request_state:RequestState",
        why="under which weights the KV of a request was computed, and is looked up",
        remove_when="upstream has a weight version in its block hashes",
    ),
]
