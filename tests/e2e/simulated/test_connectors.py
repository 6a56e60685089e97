"""What a connector with keys of its own holds after a commit is of the new weights."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.e2e.simulated.test_sessions import TEXT, Told, heard, say
from tests.support.engines.bare_core import call
from tests.support.simulated.core import assert_told_truly, stage_weights
from tests.support.simulated.graph import Queued
from tests.support.simulated.load import LABELS, answered, ask, code, started
from vllm.inflight.engine.scheduling import kv_connectors
from vllm.inflight.engine.scheduling.prefix_cache import NamespacePolicy

pytestmark = pytest.mark.engine


class Saving:
    """Would keep what every step computes; notes how many are to come yet."""

    def __init__(self, core: EngineCore) -> None:
        self._worker: Any = core.model_executor
        self.num_to_come: list[int] = []

    def reset_cache(self) -> bool:
        self.num_to_come.append(len(self._worker.submitted))
        return True

    def request_finished(self, *request: Any) -> tuple[bool, None]:
        return False, None

    def shutdown(self) -> None:
        pass


@pytest.fixture
def core(make: Callable[..., EngineCore]) -> Iterator[EngineCore]:
    core = make(Queued, pipeline_parallel_size=2)
    policy = core.scheduler.vllm_inflight.policy
    yield core
    core.scheduler.vllm_inflight.policy = policy


def switched(core: EngineCore, method: str, **body: Any) -> tuple[Any, list[int]]:
    """The reply to a switch beside the connector, and the steps it came before."""
    connector = core.scheduler.connector = Saving(core)
    reply = ask(core, method, **body).result()
    core.scheduler.connector = None
    return reply, connector.num_to_come


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_no_step_of_the_old_weights_saves_kv_after_the_connector_drops_its_cache(
    core: EngineCore, mode: str
) -> None:
    streams = started(core)
    stage_weights(core, 1)
    assert core.model_executor.submitted
    reply, num_to_come = switched(core, "commit", mode=mode, weight_version="one")
    assert (reply["ok"]["weight_version"], num_to_come) == ("one", [0])
    assert_told_truly(core, streams.run(), LABELS.get)


def test_an_in_place_switch_is_rejected_while_requests_would_save_old_kv(
    core: EngineCore,
) -> None:
    streams = started(core)
    stage_weights(core, 1)
    refused, num_to_come = switched(core, "commit", mode="in_place")
    assert (code(refused), num_to_come) == ("pause_conflict", [])
    assert "Saving" in refused["error"]["message"]
    assert "retract" in refused["error"]["message"]
    assert call(core, "status")["active"]["phase"] == "staged"
    call(core, "commit", weight_version="one")
    refused, _ = switched(core, "rollback", mode="in_place")
    assert code(refused) == "pause_conflict"
    assert_told_truly(core, streams.run(), LABELS.get)


def test_a_commit_without_a_mode_retracts_requests_that_cannot_stay(
    core: EngineCore,
) -> None:
    streams = started(core)
    stage_weights(core, 1)
    update_id = call(core, "status")["active"]["update_id"]
    for method, body in (
        ("commit", {"weight_version": "one"}),
        ("undo", {"update_id": update_id}),
        ("rollback", {}),
    ):
        while not core.scheduler.running:
            streams.step()
        reply, num_to_come = switched(core, method, **body)
        assert (reply["ok"]["num_retracted"] > 0, num_to_come) == (True, [0]), method
    assert_told_truly(core, streams.run(), LABELS.get)


def test_a_session_between_two_inputs_keeps_its_kv_and_a_commit_out(
    core: EngineCore,
) -> None:
    streams = Told(core)
    say(core, list(TEXT))
    heard(core, streams, 4)
    assert not core.scheduler.running
    stage_weights(core, 1)
    for mode in (None, "in_place", "retract", "wait"):
        refused, num_to_come = switched(core, "commit", mode=mode)
        assert (code(refused), num_to_come) == ("pause_conflict", [])
        assert "use mode 'abort'" in refused["error"]["message"]
    assert switched(core, "commit", mode="abort")[1] == [0]


def test_a_session_that_ends_its_turn_makes_the_waiting_commit_fail(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(core)
    monkeypatch.setattr(kv_connectors, "_apart", lambda scheduler: [saving])
    streams = Told(core)
    say(core, list(TEXT))
    while not core.scheduler.running:
        streams.step()
    stage_weights(core, 1)
    commit = ask(core, "commit", mode="wait")
    assert not commit.done()
    heard(core, streams, 4)
    assert code(answered(commit)) == "pause_conflict"
    assert saving.num_to_come == []


def test_the_undo_of_a_commit_is_not_rejected_because_of_running_requests(
    core: EngineCore,
) -> None:
    streams = started(core)
    stage_weights(core, 1)
    update_id = call(core, "status")["active"]["update_id"]
    streams.run()
    call(core, "commit", weight_version="one")
    streams = Told(core)
    say(core, list(TEXT))
    heard(core, streams, 4)
    refused, _ = switched(core, "rollback")
    assert code(refused) == "pause_conflict"
    reply, num_to_come = switched(core, "undo", update_id=update_id)
    assert (reply["ok"]["weight_version"], num_to_come) == ("default", [0])


def test_a_commit_drops_an_idle_connectors_cache_and_keeps_shared_kv(
    core: EngineCore,
) -> None:
    stage_weights(core, 1)
    assert switched(core, "commit")[1] == [0]
    streams = started(core)
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("shared")
    stage_weights(core, 2)
    reply, num_to_come = switched(core, "commit", weight_version="two")
    assert (reply["ok"]["weight_version"], num_to_come) == ("two", [])
    streams.run()
