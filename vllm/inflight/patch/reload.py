"""Changes around upstream's calls that write into live weights of a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.inflight import upstream
from vllm.inflight.patch.records.record import Patch
from vllm.inflight.worker.worker_state import WorkerState

if TYPE_CHECKING:
    import torch


def _reload(original: Callable[..., Any]) -> Callable[..., Any]:
    def reload_weights(
        self: upstream.WorkerBase, *args: object, **kwargs: object
    ) -> None:
        from vllm.inflight.worker.integrity.outside_writes import overwriting

        with overwriting(self):
            original(self, *args, **kwargs)

    return reload_weights


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_weights(self: upstream.WorkerBase) -> None:
        from vllm.inflight.worker.integrity.outside_writes import note, overwriting

        with overwriting(self):
            note(self.model_runner.get_model())
            original(self)

    return reset_weights


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy(layer: torch.nn.Module, info: object) -> None:
        from vllm.inflight.worker.integrity.outside_writes import note, note_copied

        note(layer)
        original(layer, info)
        note_copied(layer)

    return copy


def _noted_when_aside(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore_layer_on_meta(layer: torch.nn.Module, info: object) -> Any:
        from vllm.inflight.worker.integrity.outside_writes import note_load
        from vllm.inflight.yielding import break_if_due

        note_load(layer)
        restored = original(layer, info)
        break_if_due()  # upstream goes on to the next layer
        return restored

    return restore_layer_on_meta


def _noted_when_found(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_parameter_for_reload(model: torch.nn.Module, name: str) -> Any:
        from vllm.inflight.worker.integrity.outside_writes import note

        param = original(model, name)
        note(model)
        return param

    return get_parameter_for_reload


def _refused_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def phase(self: upstream.WorkerBase, *args: object, **kwargs: object) -> Any:
        from vllm.inflight.worker.integrity.outside_writes import refuse

        stager = WorkerState.of(self).stager
        if stager is not None and stager.shadow.module is not None:
            refuse(original.__name__)
        return original(self, *args, **kwargs)

    return phase


_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RELOAD = "vllm.model_executor.model_loader.reload"

PATCHES = [
    Patch(
        target=f"{_WORKER}.reload_weights",
        expects=("self", "args", "kwargs"),
        why="adapters stay loaded, and no step runs during the reload",
        remove_when="upstream's reload keeps adapters",
        around=_reload,
    ),
    Patch(
        target=f"{_WORKER}.reset_weights",
        expects=("self",),
        why="no step runs during the reset",
        remove_when="upstream's worker calls run on the stream of the steps",
        around=_reset,
        since="0.32.0",
    ),
    Patch(
        target=f"{_RELOAD}.layerwise:restore_layer_on_meta",
        expects=("layer", "info"),
        why="no step runs on a layer whose memory a reload has taken away",
        remove_when="upstream's reload reports that it is under way",
        around=_noted_when_aside,
    ),
    Patch(
        target=f"{_RELOAD}.layerwise:_copy_and_restore_kernel_tensors",
        expects=("layer", "info"),
        why="a write into live weights by a reload is noted, from any caller",
        remove_when="upstream's reload reports what it has written",
        around=_noted,
    ),
    Patch(
        target=f"{_RELOAD}.inplace:get_parameter_for_reload",
        expects=("model", "name"),
        why="a reload of weights in kernel format is noted, too",
        remove_when="upstream's reload reports what it has written",
        around=_noted_when_found,
        since="0.32.0",
    ),
    *(
        Patch(
            target=f"{_WORKER}.{name}",
            expects=parameters,
            why="a worker's own call of a step of an update is rejected on its rank",
            remove_when="upstream's updates are transactional",
            around=_refused_alone,
        )
        for name, parameters in (
            ("start_weight_update", ("self",)),
            ("start_draft_weight_update", ("self",)),
            ("update_weights", ("self", "update_info")),
            ("finish_weight_update", ("self",)),
        )
    ),
]
