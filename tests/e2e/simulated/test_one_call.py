"""A whole update in one call: what an engine is asked, and what a failure leaves."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from tests.support.simulated.doors import Door, Slow, served
from tests.support.simulated.worker import SimulatedExecutor
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.calls import Call, StartUpdate
from vllm.inflight.errors import (
    Conflict,
    InflightError,
    Malformed,
    UnknownUpdate,
    UpdateBusy,
    VersionConflict,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.messages import Status

pytestmark = pytest.mark.engine

OPENING = {"transport": "local", "weight_version": "one"}


class Noting(Door):
    """Notes the control calls."""

    def __init__(self, cores: list[Any]) -> None:
        super().__init__(cores)
        self.called: list[str] = []

    async def call(self, asked: Call) -> list[Any]:
        self.called.append(asked.name)
        return await super().call(asked)


class Late(SimulatedExecutor):
    """When it is to be late, it executes no command before the last one has come."""

    is_late = False

    def _inflight_command(self, serial: int, command: str, values: Any) -> Any:
        if not self.is_late:
            return super()._inflight_command(serial, command, values)
        self.waiting = [*getattr(self, "waiting", ()), (serial, command, values)]
        if command == "prepare":
            for each in self.waiting:
                super()._inflight_command(*each)
        return {"ok": None}


class Rejecting(SimulatedExecutor):
    """Rejects what it has received."""

    def _inflight_command(self, serial: int, command: str, values: Any) -> Any:
        if command != "prepare":
            return super()._inflight_command(serial, command, values)
        error = WeightsMismatch("a.weight is missing", tensors=["a.weight"])
        status = Status(serial, "failed", orders=2, error=error.to_dict())
        assert self.board is not None
        for rank in range(self.board.num_ranks):
            self.board.post(rank, status.to_dict())
        return {"ok": None}


def update(
    control: Control, weights: int = 1, finish: dict[str, Any] | None = None, **how: Any
) -> Any:
    """A whole update, whose start has the fields `start` beside `OPENING`."""
    start = StartUpdate(**OPENING, **how.pop("start", {}))
    finish = {} if finish is None else finish
    return control.update_in_one_call(
        [{"weights": weights}], start=start, finish=finish, **how
    )


def active(core: EngineCore) -> Any:
    return call(core, "status")["active"]


def test_one_engine_is_asked_twice_and_waits_for_no_reply_before_the_vote(
    make: Callable[..., EngineCore],
) -> None:
    core = make(Late, is_async=True)
    core.model_executor.is_late = True
    door = Noting([core])
    reply = run_sync(update(Control(door)))
    assert door.called == ["advance", "commit"]
    assert (reply["weight_version"], served([core])) == ("one", [("one", 1)])
    assert {"gap_ms", "seconds", "digest", "update_id"} <= reply.keys()


def test_several_engines_all_accept_a_call_before_the_next_one(
    cores: list[Any],
) -> None:
    door = Noting(cores)
    reply = asyncio.run(update(Control(door)))
    assert door.called == ["may_start", "start", "receive", "prepare", "commit"]
    assert len(reply["engines"]) == 2
    assert served(cores) == [("one", 1)] * 2


@pytest.mark.parametrize("busy", [0, 1])
def test_an_update_that_one_of_two_engines_rejects_is_open_on_none(
    cores: list[Any], busy: int
) -> None:
    call(cores[busy], "start", update_id="another", transport="local")
    door = Noting(cores)
    with pytest.raises(UpdateBusy):
        asyncio.run(update(Control(door)))
    assert "receive" not in door.called
    assert active(cores[1 - busy]) is None
    assert active(cores[busy])["update_id"] == "another"


def test_the_error_of_a_rejected_start_is_the_callers_and_nothing_else_is_done(
    core: EngineCore,
) -> None:
    call(core, "start", update_id="another", transport="local")
    with pytest.raises(UpdateBusy, match="'another' is staging"):
        run_sync(update(Control(Door([core]))))
    assert active(core)["phase"] == "staging"
    with pytest.raises(VersionConflict, match="base_version"):
        call(core, "abort")
        wrong = {"base_version": "served by nobody"}
        run_sync(update(Control(Door([core])), start=wrong))
    assert active(core) is None
    assert served([core]) == [("default", 0)]


def test_an_update_of_another_caller_under_the_same_id_is_left_alone(
    core: EngineCore,
) -> None:
    theirs = {"update_id": "shared", "transport": "local", "owner": "they"}
    call(core, "start", **theirs)
    with pytest.raises(Conflict, match="started with another body"):
        run_sync(update(Control(Door([core])), start={"update_id": "shared"}))
    assert active(core)["owner"] == "they"
    # It has got no chunk: its own is the first one.
    call(core, "receive", update_info={"weights": 2}, update_id="shared", chunk=0)
    call(core, "prepare", update_id="shared")
    call(core, "commit", update_id="shared", weight_version="two")
    assert served([core]) == [("two", 2)]


def test_an_abort_with_a_fingerprint_spares_another_update_of_the_same_id(
    core: EngineCore,
) -> None:
    call(core, "start", update_id="theirs", transport="local", fingerprint="theirs")
    answer = core.inflight("abort", {"update_id": "theirs", "fingerprint": "ours"})
    assert answer["error"]["code"] == Conflict.code
    assert active(core)["update_id"] == "theirs"
    call(core, "abort", update_id="theirs", fingerprint="theirs")
    assert active(core) is None


def test_an_update_whose_chunk_is_rejected_is_not_left_open(core: EngineCore) -> None:
    control = Control(Door([core]))
    wrong: Any
    for wrong in (5, "first"):
        with pytest.raises(Malformed, match="chunk must be the next number, 0"):
            run_sync(update(control, chunk=wrong, start={"update_id": f"{wrong}"}))
        assert active(core) is None
        assert call(core, "status", update_id=f"{wrong}")["phase"] == "aborted"
    run_sync(update(control))
    assert served([core]) == [("one", 1)]


def test_an_update_that_a_rank_rejects_ends_with_the_error_of_the_rank(
    make: Callable[..., EngineCore],
) -> None:
    core = make(Rejecting, is_async=True)
    control = Control(Door([core]))
    for _ in range(2):  # the call may be repeated, and the error is the same
        with pytest.raises(WeightsMismatch, match=r"a\.weight is missing") as raised:
            run_sync(update(control, start={"update_id": "rejected"}))
        assert raised.value.tensors == ["a.weight"]
        assert raised.value.update_id == "rejected"
    assert active(core) is None


def test_a_rejected_commit_ends_the_update_that_the_same_call_has_opened(
    core: EngineCore,
) -> None:
    control = Control(Door([core]))
    expected = {"expect_version": "served by nobody"}
    with pytest.raises(VersionConflict, match="expect_version"):
        run_sync(update(control, finish=expected))
    assert active(core) is None
    # An update that was opened before is left to its caller.
    run_sync(control.start(StartUpdate("open", **OPENING)))
    with pytest.raises(VersionConflict, match="expect_version"):
        run_sync(control.update_in_one_call([{"weights": 1}], finish=expected))
    assert active(core)["phase"] == "staged"
    run_sync(control.finish())
    assert served([core]) == [("one", 1)]


def test_an_update_that_was_opened_with_a_chunk_goes_on_with_other_calls(
    core: EngineCore,
) -> None:
    control = Control(Door([core]))
    start = StartUpdate(**OPENING)
    reply = run_sync(control.update_in_one_call([{"weights": 1}], start=start))
    assert reply["phase"] == "staging"
    assert {"bytes", "parameters"} <= reply.keys()
    run_sync(control.prepare())
    run_sync(control.finish())
    assert served([core]) == [("one", 1)]


def test_a_repeated_call_gets_the_reply_of_the_first_one(core: EngineCore) -> None:
    control = Control(Door([core]))
    start = StartUpdate("repeated", **OPENING)
    received = [
        run_sync(control.update_in_one_call([{"weights": 1}], start=start))
        for _ in range(2)
    ]
    assert received[0] == received[1]
    replies = [run_sync(update(control, start={"update_id": "repeated"})) for _ in "ab"]
    assert replies[0] == replies[1]
    assert replies[0]["epoch"] == core.vllm_inflight.version.epoch
    run_sync(control.rollback())
    with pytest.raises(WrongPhase, match="rolled_back"):
        run_sync(update(control, start={"update_id": "repeated"}))
    assert served([core]) == [("default", 0)]


def test_a_call_that_opens_nothing_needs_an_open_update(core: EngineCore) -> None:
    control = Control(Door([core]))
    with pytest.raises(UnknownUpdate):
        run_sync(
            control.update_in_one_call(
                [{"weights": 1}], finish={}, update_id="unheard of"
            )
        )
    with pytest.raises(InflightError):
        run_sync(control.update_in_one_call([{"weights": 1}], finish={}))


@pytest.mark.parametrize("name", ["may_start", "start", "receive", "prepare"])
def test_a_cancelled_update_of_two_engines_does_not_stay_active(
    cores: list[Any], name: str
) -> None:
    Slow(cores, name).cancel(update)
    assert [active(core) for core in cores] == [None, None]
