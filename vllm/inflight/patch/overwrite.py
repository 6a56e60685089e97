"""Changes around upstream's calls that write into what a worker serves."""

from __future__ import annotations

from typing import Any

from vllm.inflight.patch.record import Patch


def _reload(original: Any) -> Any:
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.inflight.commit.overwrite import overwriting

        with overwriting(self):
            original(self, *args, **kwargs)

    return reload_weights


def _reset(original: Any) -> Any:
    def reset_weights(self: Any) -> None:
        from vllm.inflight.commit.overwrite import note, overwriting

        with overwriting(self):
            note()
            original(self)

    return reset_weights


def _noted(original: Any) -> Any:
    def copy(*args: Any) -> None:
        from vllm.inflight.commit.overwrite import note

        note()
        original(*args)

    return copy


def _noted_when_found(original: Any) -> Any:
    def get_parameter_for_reload(model: Any, name: str) -> Any:
        from vllm.inflight.commit.overwrite import note

        param = original(model, name)
        note()
        return param

    return get_parameter_for_reload


_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RELOAD = "vllm.model_executor.model_loader.reload"

PATCHES = [
    Patch(
        target=f"{_WORKER}.reload_weights",
        expects=("self", "args", "kwargs"),
        why="adapters stay loaded, and a step comes before it or after it",
        remove_when="upstream's reload keeps adapters",
        around=_reload,
    ),
    Patch(
        target=f"{_WORKER}.reset_weights",
        expects=("self",),
        why="a step comes before it or after it",
        remove_when="upstream's calls of workers run on the stream that computes",
        around=_reset,
    ),
    Patch(
        target=f"{_RELOAD}.layerwise:_copy_and_restore_kernel_tensors",
        expects=("layer", "info"),
        why="a reload that fails before its first write has changed nothing",
        remove_when="upstream's reload says what it has written",
        around=_noted,
    ),
    Patch(
        target=f"{_RELOAD}.inplace:get_parameter_for_reload",
        expects=("model", "name"),
        why="the same, of weights in kernel format",
        remove_when="upstream's reload says what it has written",
        around=_noted_when_found,
    ),
]
