"""The drift that `/metrics` tells is of what is served and what was before it."""

from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from tests.support.simulated.core import stage_weights

pytestmark = pytest.mark.engine


@pytest.fixture
def core(make: Callable[..., EngineCore]) -> EngineCore:
    """A core that serves `two`, a long way from `one`."""
    core = make()
    publish(core, 1, 0.1)
    publish(core, 2, 0.2)
    return core


def publish(core: EngineCore, weights: int, drift: float | None) -> None:
    stage_weights(core, weights)
    known = None if drift is None else {"overall": drift}
    core.vllm_inflight.updates.ledger.active.drift = known
    call(core, "commit")


def told(core: EngineCore) -> float | None:
    return call(core, "metrics")["drift"]


def test_a_rollback_keeps_the_reported_drift(core: EngineCore) -> None:
    assert told(core) == 0.2
    for _ in range(2):
        call(core, "rollback")
        assert told(core) == 0.2
    call(core, "start", transport="local")
    assert told(core) == 0.2
    call(core, "abort")


def test_an_undone_switch_restores_the_drift_of_the_version_before(
    core: EngineCore,
) -> None:
    publish(core, 3, 0.3)
    assert told(core) == 0.3
    core.vllm_inflight.live_version.undo()
    assert told(core) == 0.2


def test_drift_is_not_reported_for_versions_that_cannot_be_compared(
    core: EngineCore,
) -> None:
    publish(core, 3, None)
    assert told(core) is None
    call(core, "rollback")
    assert told(core) is None
