"""Names of upstream that our classes override, and private names that our code uses.

Nothing here changes upstream. `make upstream V=...` checks every record on another
release, as it checks the patches. A test lets no file outside of `patch/` use a private
name of upstream that has no record.
"""

from __future__ import annotations

from vllm.inflight.patch.records.record import Override, Private

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_CORE = "vllm.v1.engine.core"
_LORA = "vllm.lora.worker_manager:WorkerLoRAManager"
_REGISTRY = "vllm.lora.model_manager:LoRAModelManager"
_RELOAD = "vllm.model_executor.model_loader.reload.layerwise:"

OVERRIDES = [
    Override(
        target=f"{_SCHEDULER}.schedule",
        expects=("self", "throttle_prefills"),
        why="a step is stamped with the live version when it is scheduled",
        remove_when="upstream stamps steps at schedule time",
    ),
    Override(
        target=f"{_SCHEDULER}.update_from_output",
        expects=("self", "scheduler_output", "model_runner_output"),
        why="the outputs of a step carry the stamp of that step",
        remove_when="upstream stamps steps at schedule time",
    ),
    Override(
        target=f"{_SCHEDULER}.add_request",
        expects=("self", "request"),
        why="a request may ask for the KV provenance of its tokens",
        remove_when="upstream reports which version computed the KV of a request",
    ),
    Override(
        target=f"{_SCHEDULER}.get_num_unfinished_requests",
        expects=("self",),
        why="a pause with `wait` also waits for preempted requests",
        remove_when="upstream counts preempted requests while it admits no new ones",
    ),
    Override(
        target=f"{_SCHEDULER}._free_request",
        expects=("self", "request", "delay_free_blocks"),
        why="a late chunk of an aborted session must not begin a new request",
        remove_when="upstream marks the chunk that begins a session",
    ),
    Override(
        target=f"{_SCHEDULER}._get_local_prefix_cache_hit",
        expects=("self", "request"),
        why="a request looks up KV in the prefix-cache namespace of its version",
        remove_when="upstream has a weight version in its block hashes",
    ),
    Override(
        target=f"{_SCHEDULER}._handle_blocked_waiting_request",
        expects=("self", "request"),
        why="no request overtakes a retracted one whose last tokens are on their way",
        remove_when="upstream keeps the order of preempted requests",
        since="0.31.0",
    ),
    Override(
        target=f"{_SCHEDULER}._is_blocked_waiting_status",
        expects=("status",),
        why="no request overtakes a retracted one whose last tokens are on their way",
        remove_when="0.31 is the oldest supported release",
        before="0.31.0",
    ),
    Override(
        target=f"{_SCHEDULER}._try_promote_blocked_waiting_request",
        expects=("self", "request"),
        why="no request overtakes a retracted one whose last tokens are on their way",
        remove_when="0.31 is the oldest supported release",
        before="0.31.0",
    ),
]

PRIVATES = [
    Private(
        target=f"{_SCHEDULER}._preempt_request",
        expects=("self", "request", "timestamp", "drop_stale_output"),
        why="retraction sends running requests back to the queue",
        remove_when="upstream can preempt chosen requests",
    ),
    Private(
        target=f"{_SCHEDULER}._free_request_blocks",
        expects=("self", "request"),
        why="retraction frees the KV of requests that wait with KV from elsewhere",
        remove_when="upstream can preempt chosen requests",
    ),
    Private(
        target=f"{_SCHEDULER}._pause_state",
        why="a step admits preempted requests while it holds new ones back",
        remove_when="0.32 is the oldest supported release",
        before="0.32.0",
    ),
    Private(
        target=f"{_SCHEDULER}._inflight_prefills",
        why="a retracted request is no prefill under way any more",
        remove_when="upstream can preempt chosen requests",
    ),
    Private(
        target=f"{_CORE}:EngineCoreProc._send_abort_outputs",
        expects=("self", "aborted_reqs"),
        why="clients hear of requests that a pause or a commit has aborted",
        remove_when="upstream sends these outputs from its scheduler",
    ),
    Private(
        target=f"{_CORE}:EngineCore._weight_version",
        why="upstream's own label names the live version",
        remove_when="upstream binds the label to the weights",
    ),
    Private(
        target=(
            "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:"
            "MultiConnector._connectors"
        ),
        why="each connector inside a MultiConnector is checked by itself",
        remove_when="upstream says how a connector keys its KV",
    ),
    Private(
        target=f"{_LORA}._load_adapter",
        expects=("self", "lora_request"),
        why="every rank reads an adapter before any rank uses it",
        remove_when="upstream loads an adapter on every rank or on none",
    ),
    Private(
        target=f"{_LORA}._adapter_manager",
        why="a rank puts the adapters before back where another rank has failed",
        remove_when="upstream loads an adapter on every rank or on none",
    ),
    Private(
        target=f"{_REGISTRY}._registered_adapters",
        why="pinned adapters stay pinned when an adapter is put back",
        remove_when="upstream lists its pinned adapters",
    ),
    Private(
        target=(
            "vllm.distributed.weight_transfer.factory:"
            "WeightTransferEngineFactory._registry"
        ),
        why="a backend is registered once, and rejected if it hands over parts",
        remove_when="upstream lists its backends",
    ),
    Private(
        target=f"{_RELOAD}_do_torchao_reload",
        why="a reload that broke off leaves the model as it was",
        remove_when="upstream undoes a reload that broke off",
    ),
    Private(
        target=f"{_RELOAD}_original_do_torchao_reload",
        why="a reload that broke off leaves the model as it was",
        remove_when="upstream undoes a reload that broke off",
    ),
    Private(
        target=(
            "vllm.model_executor.layers.fused_moe.routed_experts:"
            "RoutedExperts._expert_map"
        ),
        why="a rank that holds some of the experts passes the tensors of others over",
        remove_when="upstream says whether a layer shares its experts out",
    ),
]
