"""The utility of an engine core that carries every control call.

Upstream calls a utility by its name, so senders take the name from this function.
"""

from __future__ import annotations

from typing import Any

from vllm.inflight import upstream


def inflight(self: upstream.EngineCore, name: str, fields: dict[str, Any]) -> Any:
    """Answer a control call of vLLM in-flight; see calls.py."""
    # The API process takes only the name of this function from here.
    from vllm.inflight.engine.controller import Controller

    return Controller.of(self).call_by_name(name, fields)
