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
    Attribute(
        target="vllm.v1.worker.worker_base:WorkerBase",
        holds=f"{_OURS}.worker.worker_state:WorkerState",
        why="the shadow model, the staging thread and the tripwire of a rank",
        remove_when="upstream stages weights beside the live ones",
    ),
    Attribute(
        target="vllm.lora.worker_manager:WorkerLoRAManager",
        holds=f"{_OURS}.worker.lora:KeptAdapters",
        why="the adapters that stay in host memory, so that no step reads a file",
        remove_when="upstream's requests name an adapter, and not its files",
    ),
    Attribute(
        target="vllm.lora.lora_model:LoRAModel",
        holds=f"{_OURS}.worker.lora:MergedAdapter",
        why="the modules of an adapter are merged once",
        remove_when="upstream's merging can be repeated",
    ),
    Attribute(
        target="torch.nn:Module",
        holds=f"{_OURS}.worker.model_state:ModelState",
        why="what a model was built from, where it lies, and which tripwire watches it",
        remove_when="upstream stages weights beside the live ones",
    ),
]
