"""How an engine answers invalid values, from Python and from HTTP."""

from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from tests.support.simulated.core import stage_weights
from tests.support.simulated.load import code

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("allow_nonfinite", value) for value in ("false", "no", "", 0, 1)),
        *(("deadline_s", value) for value in (0, False, "", -1)),
    ],
)
def test_an_update_does_not_begin_with_a_wrong_value(
    make: Callable[..., EngineCore], field: str, value: object
) -> None:
    core = make()
    refused = core.inflight("start", {"transport": "local", field: value})
    assert code(refused) == "malformed"
    assert field in refused["error"]["message"]
    assert call(core, "status")["active"] is None


@pytest.mark.parametrize("method", ["commit", "pause"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("flush_cache", value) for value in ("false", "no", "", 0, 1)),
        *(("mode", value) for value in ("", 0, False, [])),
    ],
)
def test_a_call_with_an_invalid_value_neither_switches_nor_pauses(
    make: Callable[..., EngineCore], method: str, field: str, value: object
) -> None:
    core = make()
    stage_weights(core, 1)
    refused = core.inflight(method, {field: value})
    assert code(refused) == "malformed"
    assert field in refused["error"]["message"]
    assert call(core, "paused")["is_paused"] is False
    assert call(core, "status")["active"]["phase"] == "staged"


def test_a_rollback_with_an_invalid_mode_is_rejected(
    make: Callable[..., EngineCore],
) -> None:
    core = make()
    stage_weights(core, 1)
    call(core, "commit", weight_version="one")
    assert code(core.inflight("rollback", {"mode": ""})) == "malformed"
    assert call(core, "info")["weight_version"] == "one"
