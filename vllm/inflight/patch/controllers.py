"""The controller of an engine core, which `patch/engine_core.py` makes.

Its module is imported at the first call, so that a process without an engine core does
not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.inflight import upstream

if TYPE_CHECKING:
    from vllm.inflight.engine.controller import Controller


def controller_of(core: upstream.EngineCore) -> Controller:
    """The controller of `core`.

    Raises:
        UpstreamChanged: it has none.

    """
    from vllm.inflight.engine.controller import Controller

    return Controller.of(core)


def find_controller(core: upstream.EngineCore) -> Controller | None:
    """The controller of `core`; None while `core` starts."""
    from vllm.inflight.engine.controller import Controller

    return Controller.find(core)
