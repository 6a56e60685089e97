"""Changes in the worker: the shadow model, and the staging thread that fills it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import ConfigError
from vllm.inflight.patch.records.record import Patch
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
        from vllm.inflight.worker.adopted_call import is_of_method
        from vllm.inflight.worker.shadow.parameters import reloaded

        if is_of_method():
            return  # the update loader begins and ends the load of shadow weights
        model, *rest = args or (kwargs.pop("model"),)
        for part in reloaded(model):
            original(part, *rest, **kwargs)

    return reload


def _unless_calling(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        from vllm.inflight.worker.adopted_call import is_of_method

        return None if is_of_method() else original(*args, **kwargs)

    return call


def _for_the_same_threads(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: object, **kwargs: object) -> Any:
        from vllm.inflight.worker.model.kinds.cpu_packing import as_at_first

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
        # oneDNN reads the scales by address, so they must not be a parameter.
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
            # Upstream does not request AMX in its workers. On a CPU with AMX, a worker
            # in its own process would crash at its first step.
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
        from vllm.inflight.worker.staging.destination_table import fill_table
        from vllm.inflight.worker.staging.kept_table import fill_kept
        from vllm.inflight.worker.staging.worker import StagingWorker

        with upstream.set_current_vllm_config(self.vllm_config):
            shadow = shadow_of(self, self.model_runner.get_model())
            if (reason := fill_table(shadow)) is not None:
                shadow.give_up(reason)
            fill_kept(shadow)
        staging = InflightConfig.of(self.vllm_config).staging
        if shadow.reason is not None and staging != "auto":
            raise ConfigError(
                f"--inflight-staging {staging} is not possible: {shadow.reason}"
            )
        state.stager = stager = StagingWorker(self, shadow)
        both = shadow.live, shadow.module
        layerwise_reload.forget_with(self, [tree for tree in both if tree is not None])
        if shadow.module is not None:
            from vllm.inflight.worker.integrity.outside_writes import reject_load

            vars(shadow.module)["load_weights"] = reject_load
        if self.model_config.enable_sleep_mode:
            from vllm.inflight.worker.sleep import backend_of

            # Upstream makes a backend when it first needs one, unless there is one.
            self._sleep_mode_backend = backend_of(stager)
        if beside := shadow.copied_bytes + stager.bucket_bytes:
            # Upstream's budget for the KV cache counts the arena, but neither torch's
            # memory beside the model nor what a transport allocates later.
            self.model_runner.model_memory_usage += beside

    return load_model


def _with_room_for_the_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    def determine_available_memory(self: upstream.Worker) -> int:
        num_bytes: int = original(self)
        asked = self.cache_config.kv_cache_memory_bytes
        if asked and _is_on(self.vllm_config) and self.device.type == "cuda":
            stager = WorkerState.of(self).stager
            buckets = 0 if stager is None else stager.bucket_bytes
            _check_room(asked, buckets, self.device)
        return num_bytes

    return determine_available_memory


def _check_room(asked: int, buckets: int, device: torch.device) -> None:
    """Raise `ConfigError` if the KV cache does not fit; upstream does not check it.

    Args:
        asked: bytes of the cache.
        buckets: bytes that a transport allocates later.
        device: the GPU.

    """
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free -= buckets
    if asked > free:
        raise ConfigError(
            f"kv_cache_memory_bytes asks for {asked / 2**30:.2f} GiB, and beside live "
            f"and shadow weights only {free / 2**30:.2f} GiB are free. Ask for less, "
            "or keep the shadow weights in host memory with --inflight-staging host"
        )


def _wait_for_decoding_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def synchronize_device(self: upstream.WorkerBase) -> None:
        stager = WorkerState.of(self).stager
        if stager is None or not stager.is_busy or self.device.type != "cuda":
            original(self)
            return
        # A broadcast stays on the device while its trainer is silent. A pause waits for
        # the steps only.
        import torch

        stream = stager.steps.stream or torch.cuda.current_stream(self.device)
        stream.synchronize()

    return synchronize_device


def _warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self: upstream.CPUWorker) -> Any:
        from vllm.inflight import upstream

        times = original(self)
        if (wire := WorkerState.of(self).tripwire) is not None:
            wire.warmed_up()
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
            from vllm.inflight.worker.model.kinds.drafter import trees

            if stager.is_busy or still_writes():
                return  # memory that is still written is freed with the process
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
        # A step without tokens computes nothing, and happens during a pause, too.
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
        remove_when="upstream's workers report whether a step runs",
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
        remove_when="upstream lets callers choose a transport's target model",
        around=_create_on_shadow,
    ),
    Patch(
        target=(
            "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model"
        ),
        expects=("self", "vllm_config", "model_config", "prefix"),
        why="on a GPU, weights are in an arena whose pages a flip exchanges",
        remove_when="upstream can load a model with a given allocator",
        around=_load_into_arena,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
        expects=("model",),
        why="shadow parameters get kernel format at once and need no layerwise reload",
        remove_when="upstream's transports leave the reload to their caller",
        around=_load_straight,
        is_public=True,
    ),
    Patch(
        target="vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
        expects=("args", "kwargs"),
        why="shadow parameters need no end of a layerwise reload either",
        remove_when="upstream's transports leave the reload to their caller",
        around=_load_straight,
        is_public=True,
    ),
    Patch(
        target=("vllm.model_executor.model_loader.utils:process_weights_after_loading"),
        expects=("model", "model_config", "target_device"),
        why="an extension that loads shadow weights does not process them itself",
        remove_when="upstream loads updates into shadow weights",
        around=_unless_calling,
        is_public=True,
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
            "a packed int8 weight keeps its scales at a flip, and all weights of one "
            "size are packed alike"
        ),
        remove_when="upstream's handler owns its scales and remembers its packing",
        around=_own_scales,
    ),
    Patch(
        target="vllm._custom_ops:create_onednn_mm",
        expects=("weight", "primitive_cache_size"),
        why=(
            "oneDNN packs for a number of threads and multiplies with the packing of "
            "the first matrix of a size, so the staging thread has to pack alike"
        ),
        remove_when="upstream's handler multiplies with its own packing",
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
            "objects of staging trigger garbage collections, which delay decoding; as "
            "in GPU workers, they now scan new objects only. And compiled steps that "
            "write weights back, as those of int4 with AMX do, are no writes from "
            "outside"
        ),
        remove_when=(
            "upstream freezes the heap of CPU workers too, and its kernels declare "
            "only what they write"
        ),
        around=_warm_up,
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
        why="kv_cache_memory_bytes is checked, since upstream's budget ignores it",
        remove_when="upstream checks kv_cache_memory_bytes against free memory",
        around=_with_room_for_the_cache,
    ),
    Patch(
        target="vllm.v1.worker.worker_base:WorkerBase.synchronize_device",
        expects=("self",),
        why="a pause does not wait for a transfer that has stalled",
        remove_when="upstream waits for the stream of the steps only",
        around=_wait_for_decoding_only,
    ),
    Patch(
        target="vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        expects=("self", "request"),
        why="a prompt that is computed again drops the pooled rows of the first run",
        remove_when="upstream drops these rows when it preempts",
        around=_pool_from_the_start,
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        expects=("self", "scheduler_output"),
        why="a request that resumes after a commit gets new encoder outputs",
        remove_when="upstream's workers get the media names of resumed requests again",
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
        "this second half of a step samples, and a drafter drafts",
    ),
    _part(
        "execute_dummy_batch",
        ("self",),
        "this is the step of a rank without requests, which other ranks wait for",
        _with_memory_too,
    ),
]
