"""In the trainer's process: weights, snapshots, and calls to engines.

`Publisher("http://127.0.0.1:8000", model).publish(version="step-7", step=7)` publishes
weights. `ControlClient` and `AsyncControlClient` ask a server's control routes.
`ServerClient` is for vLLM's own trainer interface.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.inflight.trainer.control.client import AsyncControlClient, ControlClient
    from vllm.inflight.trainer.control.engines import WaitTimeout
    from vllm.inflight.trainer.control.pause import AsyncPause, Pause, PauseLost
    from vllm.inflight.trainer.outcome import Outcome
    from vllm.inflight.trainer.publisher import Publisher
    from vllm.inflight.trainer.sync_client import ServerClient
    from vllm.inflight.trainer.token_versions import per_token_versions

__all__ = [
    "AsyncControlClient",
    "AsyncPause",
    "ControlClient",
    "Outcome",
    "Pause",
    "PauseLost",
    "Publisher",
    "ServerClient",
    "WaitTimeout",
    "per_token_versions",
]

_MODULES = {
    "AsyncControlClient": "control.client",
    "AsyncPause": "control.pause",
    "ControlClient": "control.client",
    "Outcome": "outcome",
    "Pause": "control.pause",
    "PauseLost": "control.pause",
    "Publisher": "publisher",
    "ServerClient": "sync_client",
    "WaitTimeout": "control.engines",
    "per_token_versions": "token_versions",
}


def __getattr__(name: str) -> Any:
    # A `Publisher` imports torch, which takes seconds; the other clients do not.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
