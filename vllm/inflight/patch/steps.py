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


def _part(name: str, expects: tuple[str, ...], why: str) -> Patch:
    return Patch(
        target=f"vllm.v1.worker.gpu_worker:Worker.{name}",
        expects=expects,
        why=why,
        remove_when="upstream's workers say whether a step runs",
        around=_counted,
    )


PATCHES = [
    _part(
        "execute_model",
        ("self", "scheduler_output"),
        "staging rests while the rank decodes, and only then",
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
    ),
]
