"""The utility of an engine core that carries every control call.

Upstream calls a utility by its name, so senders take the name from this function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.inflight import upstream

if TYPE_CHECKING:
    from vllm.inflight.engine.controller import Controller


def inflight(self: upstream.EngineCore, name: str, fields: dict[str, Any]) -> Any:
    """Answer a control call of vLLM in-flight; see calls.py."""
    controller: Controller = self.inflight_controller
    return controller.call_by_name(name, fields)
