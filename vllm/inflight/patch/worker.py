"""Changes in the worker: a shadow beside the model, and a thread that fills it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import ConfigError
from vllm.inflight.patch.record import Patch
from vllm.inflight.worker.worker_state import WorkerState

if TYPE_CHECKING:
    import torch


def _is_on(vllm_config: upstream.VllmConfig) -> bool:
    return InflightConfig.of(vllm_config).staging != "off"


_loading: ContextVar[Any] = ContextVar("worker that loads its model", default=None)


def _create_on_shadow(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine(
        cls: Any,
        config: object,
        vllm_config: upstream.VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> Any:
        worker = _loading.get()
        if worker is not None and _is_on(vllm_config):
            from vllm.inflight.worker.shadow.shadow_model import shadow_of

            shadow = shadow_of(worker, model)
            model = shadow.module if shadow.module is not None else model
        return original(cls, config, vllm_config, device, model)

    return create_engine


def _load_into_arena(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(
        self: upstream.BaseModelLoader,
        vllm_config: upstream.VllmConfig,
        model_config: upstream.ModelConfig,
        prefix: str = "",
    ) -> Any:
        def load() -> Any:
            model = original(self, vllm_config, model_config, prefix)
            note(model, BuildInputs(vllm_config, model_config, prefix))
            return model

        if not _is_on(vllm_config):
            return original(self, vllm_config, model_config, prefix)
        from vllm.inflight.worker.memory.placement import load_into_arena
        from vllm.inflight.worker.shadow.build import BuildInputs, note

        return load_into_arena(load, vllm_config)

    return load_model


def _load_straight(original: Callable[..., Any]) -> Callable[..., Any]:
    def reload(*args: Any, **kwargs: Any) -> None:
        from vllm.inflight.worker.shadow.parameters import reloaded

        model, *rest = args or (kwargs.pop("model"),)
        for part in reloaded(model):
            original(part, *rest, **kwargs)

    return reload


def _for_the_same_threads(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: object, **kwargs: object) -> Any:
        from vllm.inflight.worker.model.cpu_packing import as_at_first

        with as_at_first():
            return original(*args, **kwargs)

    return create


def _own_scales(original: Callable[..., Any]) -> Callable[..., Any]:
    pack = _for_the_same_threads(original)

    def create(
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> Any:
        # It reads them by address: they must not be a parameter, which changes hands.
        scales = weight_scales.clone()
        handler = pack(weight, scales, *args, **kwargs)
        handler.scales = scales
        return handler

    return create


def _load_with_shadow(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(self: upstream.Worker, *, load_dummy_weights: bool = False) -> None:
        import torch

        from vllm.inflight import upstream

        if self.device.type == "cpu":
            # Upstream asks the system for AMX in no worker. On a CPU that has it, one
            # in a process of its own would die at its first step.
            torch.cpu._init_amx()
        token = _loading.set(self)
        try:
            original(self, load_dummy_weights=load_dummy_weights)
        finally:
            _loading.reset(token)
        from vllm.inflight.worker.integrity.tripwire import Tripwire

        state = WorkerState.of(self)
        state.tripwire = Tripwire(self)
        if not _is_on(self.vllm_config):
            return
        from vllm.inflight.worker.model import layerwise_reload
        from vllm.inflight.worker.shadow.shadow_model import shadow_of
        from vllm.inflight.worker.staging.worker import StagingWorker

        with upstream.set_current_vllm_config(self.vllm_config):
            shadow = shadow_of(self, self.model_runner.get_model())
        staging = InflightConfig.of(self.vllm_config).staging
        if shadow.reason is not None and staging != "auto":
            raise ConfigError(
                f"--inflight-staging {staging} cannot be had: {shadow.reason}"
            )
        state.stager = StagingWorker(self, shadow)
        both = shadow.live, shadow.module
        layerwise_reload.forget_with(self, [tree for tree in both if tree is not None])
        if shadow.module is not None:
            from vllm.inflight.worker.integrity.outside_writes import reject_load

            vars(shadow.module)["load_weights"] = reject_load
        if self.model_config.enable_sleep_mode:
            from vllm.inflight.worker.sleep import backend_of

            # Upstream makes one when it is first needed, unless there is one.
            self._sleep_mode_backend = backend_of(state.stager)
        if shadow.copied_bytes:
            # Upstream's budget for the KV cache sees what the arena holds, but not
            # what torch holds beside the model.
            self.model_runner.model_memory_usage += shadow.copied_bytes

    return load_model


def _with_room_for_the_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    def determine_available_memory(self: upstream.Worker) -> int:
        num_bytes: int = original(self)
        asked = self.cache_config.kv_cache_memory_bytes
        if asked and _is_on(self.vllm_config) and self.device.type == "cuda":
            _check_room(asked, self.device)
        return num_bytes

    return determine_available_memory


def _check_room(asked: int, device: torch.device) -> None:
    """Upstream takes the user's word for it, and fails later without a reason."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if asked > free:
        raise ConfigError(
            f"kv_cache_memory_bytes asks for {asked / 2**30:.2f} GiB; beside two sets "
            f"of weights {free / 2**30:.2f} GiB are free: ask for less, or keep the "
            "shadow weights elsewhere with --inflight-staging host"
        )


def _wait_for_decoding_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def synchronize_device(self: upstream.WorkerBase) -> None:
        stager = WorkerState.of(self).stager
        if stager is None or not stager.is_busy or self.device.type != "cuda":
            original(self)
            return
        # A broadcast stands on the device as long as its trainer is silent; a pause
        # waits for the steps, and not for that.
        import torch

        stream = stager.steps.stream or torch.cuda.current_stream(self.device)
        stream.synchronize()

    return synchronize_device


def _freeze_heap(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self: upstream.CPUWorker) -> Any:
        from vllm.inflight import upstream

        times = original(self)
        if _is_on(self.vllm_config):
            upstream.freeze_gc_heap()
        return times

    return compile_or_warm_up_model


def _shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: upstream.Worker) -> None:
        if (stager := WorkerState.of(self).stager) is not None:
            stager.close()
        original(self)
        if stager is not None and self.device.type == "cuda":
            from vllm.inflight.transport.collective.nccl import still_writes
            from vllm.inflight.worker.memory.placement import release
            from vllm.inflight.worker.model.drafter import trees

            if stager.is_busy or still_writes():
                return  # memory that is written to is given back with the process
            for model in trees(stager.shadow.live):
                release(model)

    return shutdown


def _pool_from_the_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(
        self: upstream.InputBatch, request: upstream.CachedRequestState
    ) -> Any:
        if request.pooling_states is not None and not request.num_computed_tokens:
            request.pooling_states.clean()
        return original(self, request)

    return add_request


def _with_new_names(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.inflight.engine.scheduling import encoder_cache

    def update_states(
        self: upstream.GPUModelRunner, scheduler_output: upstream.SchedulerOutput
    ) -> Any:
        encoder_cache.learn(self.requests, scheduler_output)
        return original(self, scheduler_output)

    return update_states


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: upstream.WorkerBase, *args: object, **kwargs: object) -> Any:
        if (stager := WorkerState.of(self).stager) is None:
            return original(self, *args, **kwargs)
        with stager.steps.running():
            return original(self, *args, **kwargs)

    return step


def _with_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    counted = _counted(original)

    def execute_model(
        self: upstream.WorkerBase, scheduler_output: upstream.SchedulerOutput
    ) -> Any:
        # A step without tokens computes nothing, and comes while decoding is held.
        wire = WorkerState.of(self).tripwire
        if wire is not None and scheduler_output.total_num_scheduled_tokens:
            wire.put_back_for_step()
        return counted(self, scheduler_output)

    return execute_model


def _with_memory_too(original: Callable[..., Any]) -> Callable[..., Any]:
    counted = _counted(original)

    def execute_dummy_batch(self: upstream.WorkerBase) -> None:
        if (wire := WorkerState.of(self).tripwire) is not None:
            wire.put_back_for_step()
        counted(self)

    return execute_dummy_batch


def _part(
    name: str, expects: tuple[str, ...], why: str, around: Any = _counted
) -> Patch:
    return Patch(
        target=f"vllm.v1.worker.gpu_worker:Worker.{name}",
        expects=expects,
        why=why,
        remove_when="upstream's workers say whether a step runs",
        around=around,
    )


PATCHES = [
    Patch(
        target=(
            "vllm.distributed.weight_transfer.factory:"
            "WeightTransferEngineFactory.create_engine"
        ),
        expects=("cls", "config", "vllm_config", "device", "model"),
        why="a transport receives into the shadow weights",
        remove_when="upstream lets a transport be given its target",
        around=_create_on_shadow,
    ),
    Patch(
        target=(
            "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model"
        ),
        expects=("self", "vllm_config", "model_config", "prefix"),
        why="on a GPU, weights lie in memory whose pages can be exchanged",
        remove_when="upstream lets a model be loaded into a given allocator",
        around=_load_into_arena,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
        expects=("model",),
        why="what is loaded into twins is in kernel format and needs no second pass",
        remove_when="upstream's transports leave the reload to their caller",
        around=_load_straight,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
        expects=("args", "kwargs"),
        why="the other half of that",
        remove_when="upstream's transports leave the reload to their caller",
        around=_load_straight,
    ),
    Patch(
        target="vllm._custom_ops:create_onednn_scaled_mm",
        expects=(
            "weight",
            "weight_scales",
            "output_type",
            "dynamic_quant",
            "use_azp",
            "primitive_cache_size",
        ),
        why=(
            "a packed int8 weight keeps its scales, whichever set it is in; its form "
            "is that of the first of its size"
        ),
        remove_when="upstream's handler owns its scales, and knows its form",
        around=_own_scales,
    ),
    Patch(
        target="vllm._custom_ops:create_onednn_mm",
        expects=("weight", "primitive_cache_size"),
        why=(
            "oneDNN packs for a number of threads, and multiplies in the form of the "
            "first matrix of a size; what a staging thread packs has to have that"
        ),
        remove_when="upstream's handler multiplies in the form it has packed",
        around=_for_the_same_threads,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.load_model",
        expects=("self", "load_dummy_weights"),
        why="the shadow model is built, or found impossible, when the model is loaded",
        remove_when="upstream offers a hook after model load",
        around=_load_with_shadow,
    ),
    Patch(
        target="vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        expects=("self",),
        why=(
            "what staging makes sets off collections of garbage, which hold decoding "
            "up; they look at what is new alone, as those of GPU workers do"
        ),
        remove_when="upstream freezes the heap of CPU workers too",
        around=_freeze_heap,
        only_on="cpu",
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.shutdown",
        expects=("self",),
        why="the staging thread ends with its worker",
        remove_when="upstream offers a hook at worker shutdown",
        around=_shutdown,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        expects=("self",),
        why="kv_cache_memory_bytes goes past upstream's budget, and the shadow weights",
        remove_when="upstream checks what it is asked for",
        around=_with_room_for_the_cache,
    ),
    Patch(
        target="vllm.v1.worker.worker_base:WorkerBase.synchronize_device",
        expects=("self",),
        why="a pause does not wait for a transfer that has stalled",
        remove_when="upstream waits for the stream that computes",
        around=_wait_for_decoding_only,
    ),
    Patch(
        target="vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        expects=("self", "request"),
        why="a prompt that is computed again has no rows left of the first time",
        remove_when="upstream drops them when it preempts",
        around=_pool_from_the_start,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        expects=("self", "scheduler_output"),
        why="a request that resumes after a commit does not see with the tower before",
        remove_when="upstream's workers are told the media of resumed requests again",
        around=_with_new_names,
    ),
    _part(
        "execute_model",
        ("self", "scheduler_output"),
        "staging rests while the rank decodes, and only then; no layer lacks memory",
        _with_memory,
    ),
    _part(
        "sample_tokens",
        ("self", "grammar_output"),
        "the second half of a step: it samples, and a drafter drafts",
    ),
    _part(
        "execute_dummy_batch",
        ("self",),
        "a step in which a rank has nothing to decode, and others wait for it",
        _with_memory_too,
    ),
]
