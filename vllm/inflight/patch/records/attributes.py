"""The attributes that we set on objects of upstream, as records.

Nothing here changes upstream. `make upstream V=...` checks every record on another
release: upstream must not have an attribute of that name. Code reaches our objects by
`attached.py`, and a test lets no file set an attribute in another way.
"""

from __future__ import annotations

from vllm.inflight.patch.records.record import Attribute

_OURS = "vllm.inflight"

ATTRIBUTES = [
    Attribute(
        target="vllm.v1.request:Request",
        holds=f"{_OURS}.engine.scheduling.request_state:RequestState",
        why="the version whose weights computed the KV of a request",
        remove_when="upstream has a weight version in its block hashes",
    ),
    Attribute(
        target="vllm.v1.core.sched.output:SchedulerOutput",
        holds=f"{_OURS}.engine.scheduling.step_state:StepState",
        why="the version that a step was scheduled with, and new names of media",
        remove_when="upstream stamps steps at schedule time",
    ),
    Attribute(
        target="vllm.v1.core.sched.scheduler:Scheduler",
        holds=f"{_OURS}.engine.scheduling.scheduler:ServingState",
        why="the stamp of the next steps, and the requests that were retracted",
        remove_when="upstream stamps steps at schedule time and can preempt requests",
    ),
    Attribute(
        target="vllm.v1.engine.core:EngineCoreProc",
        holds=f"{_OURS}.engine.controller:Controller",
        why="the controller of updates and pauses of an engine core",
        remove_when="upstream's updates are transactional",
    ),
    Attribute(
        target="vllm.v1.worker.worker_base:WorkerBase",
        holds=f"{_OURS}.worker.worker_state:WorkerState",
        why="the shadow model, the staging thread and the tripwire of a rank",
        remove_when="upstream stages weights beside the live ones",
    ),
    Attribute(
        target="vllm.device_allocator.cumem:CuMemAllocator",
        holds=f"{_OURS}.worker.integrity.pool_watch:PoolUser",
        why="the worker whose memory is in upstream's pools, for who gives it back",
        remove_when="upstream reports which weights of a worker have memory",
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
        target="vllm.v1.engine.output_processor:RequestState",
        holds=f"{_OURS}.outputs.reply_state:ReplyState",
        why="the versions that the engine core has reported for a request",
        remove_when="an engine output has room for it",
    ),
    Attribute(
        target="vllm.outputs:PoolingRequestOutput",
        holds=f"{_OURS}.outputs.reply_state:PooledVersion",
        why="the version of an answer that was pooled, for the headers of the reply",
        remove_when="upstream's pooling outputs have a weight version",
    ),
    Attribute(
        target="vllm.outputs:CompletionOutput",
        name="kv_versions",
        holds=f"{_OURS}.outputs.spans:VersionSpan",
        why="users read there which versions computed the KV of a choice, as spans",
        remove_when="upstream knows which version computed a request's KV",
    ),
    Attribute(
        target="vllm.v1.engine.output_processor:RequestOutputCollector",
        holds=f"{_OURS}.engine.scheduling.aborted_sessions:SessionQueue",
        why="a new session is distinguished from late parts of an aborted one",
        remove_when="upstream's chunks say which of them begins a session",
    ),
    Attribute(
        target="vllm.v1.engine.async_llm:AsyncLLM",
        holds=f"{_OURS}.api.server.client_state:ClientState",
        why="an engine answers one heartbeat and one scrape at a time",
        remove_when="upstream's check of health asks the engine core",
    ),
    Attribute(
        target="fastapi:FastAPI",
        holds=f"{_OURS}.api.compat.framework_routes:HiddenRoutes",
        why="a route of ours that another one hides is logged once",
        remove_when="frameworks do not add routes on paths of ours",
    ),
    Attribute(
        target="torch.nn:Module",
        holds=f"{_OURS}.worker.model_state:ModelState",
        why="the source and the memory of a model, and the tripwire that watches it",
        remove_when="upstream stages weights beside the live ones",
    ),
]
