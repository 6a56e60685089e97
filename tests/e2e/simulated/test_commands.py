"""Commands to the ranks: an update is known once a rank may have its command."""

from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from tests.support.simulated.core import publish_weights
from tests.support.simulated.load import ask, code
from tests.support.simulated.worker import SimulatedExecutor
from tests.support.waiting import until
from vllm.inflight.messages import Status

pytestmark = pytest.mark.engine

JOIN = {"init_info": {"group_name": "g"}}
LEAVE = {"group_name": "g"}


class Attentive(SimulatedExecutor):
    """Does something of the test's own when it is given a command."""

    heard: Any = None

    def _inflight_command(self, serial: int, command: str, values: Any) -> Any:
        if self.heard is not None:
            self.heard(command)
        if command not in ("join", "leave"):
            return super()._inflight_command(serial, command, values)
        return {"ok": None}

    def carry_out(self, serial: int) -> None:
        """Say that the one command of `serial` is carried out."""
        status = Status(serial, "open", orders=1).to_dict()
        for rank in range(self.board.num_ranks):
            self.board.post(rank, status)


@pytest.fixture
def core(make: Any) -> EngineCore:
    core: EngineCore = make(executor=Attentive)
    core.model_executor.heard = None
    return core


def connecting(core: EngineCore) -> int:
    return core.vllm_inflight.updates._connecting.serial


def test_a_join_is_registered_before_a_rank_gets_the_command(core: EngineCore) -> None:
    """Else an update that begins then would wait with it, for as long as it does."""
    found: list[str] = []

    def begin(command: str) -> None:
        if command == "join":
            found.append(code(core.inflight("start", {"transport": "groups"})))

    core.model_executor.heard = begin
    joined = ask(core, "join_group", **JOIN)
    assert found == ["update_in_progress"]
    assert not joined.done()
    core.model_executor.carry_out(connecting(core))
    assert joined.result(timeout=30) == {"ok": {}}
    call(core, "start", transport="groups")


def test_a_join_command_that_could_not_be_sent_does_not_block_updates(
    core: EngineCore,
) -> None:
    def refuse(command: str) -> None:
        if command == "join":
            raise OSError("no room in the queue")

    core.model_executor.heard = refuse
    refused = core.inflight("join_group", dict(JOIN))
    assert "no room in the queue" in refused["error"]["message"]
    serial = core.vllm_inflight.updates.ledger.next_serial() - 1
    assert core.model_executor.board.cancelled() == serial, "some may have heard of it"
    core.model_executor.heard = None
    call(core, "start", transport="groups")


def test_a_command_that_was_not_sent_leaves_the_connecting_transport(
    core: EngineCore,
) -> None:
    def refuse(command: str) -> None:
        if command == "leave":
            raise OSError("no room in the queue")

    core.model_executor.heard = refuse
    joined = ask(core, "join_group", **JOIN)
    before = connecting(core)
    assert "error" in core.inflight("leave_group", dict(LEAVE))
    assert connecting(core) == before
    # The join was told to end, for its opposite goes past it; until it has, it counts.
    assert code(core.inflight("start", {"transport": "groups"})) == "update_in_progress"
    core.model_executor.carry_out(before)
    joined.result(timeout=30)
    call(core, "start", transport="groups")


def test_an_update_that_ends_while_its_start_is_sent_keeps_the_rollback_target(
    core: EngineCore,
) -> None:
    publish_weights(core, 1, "one")
    publish_weights(core, 2, "two")
    ledger = core.vllm_inflight.updates.ledger

    def dawdle(command: str) -> None:
        if command == "start":
            until(lambda: ledger.active is None, "its deadline does not end it")

    core.model_executor.heard = dawdle
    refused = core.inflight("start", {"transport": "local", "deadline_s": 0.05})
    assert code(refused) == "deadline_exceeded"
    assert call(core, "info")["previous"]["weight_version"] == "one"
    core.model_executor.heard = None
    call(core, "rollback", to_version="one")


def test_an_update_whose_start_command_fails_does_not_stay_active(
    core: EngineCore,
) -> None:
    for error in (OSError("no room"), KeyboardInterrupt()):

        def refuse(command: str, error: BaseException = error) -> None:
            raise error

        core.model_executor.heard = refuse
        if isinstance(error, OSError):
            refused = core.inflight("start", {"transport": "local"})
            assert "no room" in refused["error"]["message"]
        else:
            with pytest.raises(KeyboardInterrupt):
                core.inflight("start", {"transport": "local"})
        assert call(core, "status")["active"] is None
