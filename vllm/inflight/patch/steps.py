"""Changes in the worker's steps: a staging thread sees that they run."""

from __future__ import annotations

from typing import Any

from vllm.inflight.patch.record import Patch


def _counted(original: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (stager := getattr(self, "_inflight_stager", None)) is None:
            return original(self, *args, **kwargs)
        with stager.steps.running():
            return original(self, *args, **kwargs)

    return step


def _with_memory(original: Any) -> Any:
    counted = _counted(original)

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        # A step without tokens computes nothing, and comes while decoding is held.
        wire = getattr(self, "_inflight_tripwire", None)
        if wire is not None and scheduler_output.total_num_scheduled_tokens:
            wire.put_back_for_step()
        return counted(self, scheduler_output)

    return execute_model


def _with_memory_too(original: Any) -> Any:
    counted = _counted(original)

    def execute_dummy_batch(self: Any) -> None:
        if (wire := getattr(self, "_inflight_tripwire", None)) is not None:
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
