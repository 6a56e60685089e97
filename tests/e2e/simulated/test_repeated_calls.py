"""A call whose reply was lost is made again, or its caller has gone away for good."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from tests.support.simulated.core import publish_weights
from tests.support.simulated.load import ask, code
from vllm.inflight.api.compat import partial_updates
from vllm.inflight.api.compat.pipelinerl import receive
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.from_disk import from_disk
from vllm.inflight.api.request import rate_limit
from vllm.inflight.calls import (
    AdvanceUpdate,
    Call,
    ReceiveChunk,
    StartUpdate,
    call_to_dict,
)
from vllm.inflight.errors import Conflict, InflightError, UpdateBusy
from vllm.inflight.update import Phase

pytestmark = pytest.mark.engine

OPENING = {"base_version": "default", "transport": "local"}


class Door:
    """To one core."""

    num_engines = 1

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    async def call(self, asked: Call) -> list[Any]:
        # Simulated ranks know weights by number.
        if isinstance(asked, ReceiveChunk):
            asked = replace(asked, update_info={"weights": 1})
        if isinstance(asked, AdvanceUpdate):
            for name, fields in asked.calls:
                if name == ReceiveChunk.name:
                    fields["update_info"] = {"weights": 1}
        return [ask(self._core, asked.name, **call_to_dict(asked)).result(timeout=30)]


def committed(core: EngineCore, update_id: str) -> Any:
    call(core, "start", update_id=update_id, **OPENING)
    call(core, "receive", update_info={"weights": 1})
    call(core, "prepare")
    return call(core, "commit", weight_version="one")


def test_a_start_repeated_after_its_commit_is_of_the_same_update(
    core: EngineCore,
) -> None:
    committed(core, "first")
    begun = call(core, "start", update_id="first", **OPENING)
    assert begun == {"update_id": "first", "phase": "committed"}


def test_a_start_counts_against_the_rate_limit_unless_it_is_a_repetition(
    core: EngineCore,
) -> None:
    control = Control(Door(core))

    def costs(refusal: type[InflightError] | None = None, **body: Any) -> int:
        spent: list[None] = []
        token = rate_limit.allowance.set(lambda: spent.append(None))
        try:
            run_sync(control.start(StartUpdate(**OPENING, **body)))
            assert refusal is None
        except InflightError as error:
            assert type(error) is refusal
        finally:
            rate_limit.allowance.reset(token)
        return len(spent)

    assert costs(update_id="spent") == 1
    assert costs(update_id="spent") == 0
    assert costs(Conflict, update_id="spent", owner="another") == 1
    assert [costs(UpdateBusy, update_id="too many") for _ in range(3)] == [1] * 3
    assert costs(UpdateBusy) == 1
    call(core, "abort")
    assert costs(update_id="spent") == 0
    assert costs(update_id="too many") == 1


def test_a_one_call_update_repeated_after_its_commit_returns_the_same_reply(
    core: EngineCore,
) -> None:
    control = Control(Door(core))

    def update() -> Any:
        expected = {"update_id": "second", "base_version": "default"}
        return run_sync(from_disk(control, "/w", "one", **expected))

    assert update() == update()
    assert core.model_executor.live == 1


def test_a_commit_repeated_under_another_label_is_rejected_with_the_phase(
    core: EngineCore,
) -> None:
    body = {"update_id": "labelled", "weight_version": "two"}
    call(core, "start", update_id="labelled", weight_version="one", transport="local")
    call(core, "receive", update_info={"weights": 1})
    call(core, "prepare")
    for phase in ("staged", "committed"):
        refused = ask(core, "commit", **body).result(timeout=30)["error"]
        assert refused["message"].endswith(f"it stays {phase}")
        call(core, "commit", update_id="labelled")


def test_a_partial_update_is_committed_though_another_call_finishes_it_first(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = core.vllm_inflight.updates
    answer_those_who_wait = updates._watch._answer

    def answer_once_it_is_staged() -> None:
        if (active := updates.ledger.active) and active.phase is Phase.STAGED:
            answer_those_who_wait()

    class Hurried(Door):
        """Who ends the update is heard between the piece and its answer."""

        async def call(self, asked: Call) -> list[Any]:
            if not isinstance(asked, ReceiveChunk):
                return await super().call(asked)
            with monkeypatch.context() as patched:
                patched.setattr(updates._watch, "_answer", answer_once_it_is_staged)
                sent = replace(asked, update_info={"weights": 1})
                received = ask(core, "receive", **call_to_dict(sent))
                ask(core, "prepare", update_id=asked.update_id).result(timeout=30)
                answer = received.result(timeout=30)
            assert answer["ok"]["phase"] == "staged"
            assert {"bytes", "parameters"} < answer["ok"].keys()
            return [answer]

    control = Control(Hurried(core))
    taken = run_sync(
        partial_updates.take(control, "local", {}, label="pieces", commit={})
    )
    assert taken["message"] == "weights updated"
    assert taken["weight_version"] == "pieces"
    assert core.model_executor.live == 1


def test_base_version_is_checked_for_every_new_update(core: EngineCore) -> None:
    committed(core, "third")
    publish_weights(core, 2, "two")
    for update_id, more, expected in (
        ("fourth", {}, "version_conflict"),
        ("third", {"owner": "another"}, "conflict"),
    ):
        refused = ask(core, "start", update_id=update_id, **OPENING, **more)
        assert code(refused.result()) == expected


class Silent(Door):
    """Gives no answer to one method; `goes` is what its caller does meanwhile."""

    def __init__(self, core: EngineCore, method: str, goes: Any = None) -> None:
        super().__init__(core)
        self._method, self._goes = method, goes

    async def call(self, asked: Call) -> list[Any]:
        answers = await super().call(asked)
        if asked.name == self._method:
            if self._goes is not None:
                raise self._goes
            await asyncio.Event().wait()
        return answers


@pytest.mark.parametrize("method", ["advance", "commit"])
@pytest.mark.parametrize("door", ["files", "PipelineRL"])
def test_a_cancelled_one_call_update_does_not_stay_active(
    core: EngineCore, method: str, door: str
) -> None:
    def update(control: Control) -> Any:
        if door == "files":
            return from_disk(control, "/w", "one")
        return receive(control, {"version": 1, "parameters_info": []})

    async def for_a_while() -> None:
        await asyncio.wait_for(update(Control(Silent(core, method))), 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(for_a_while())
    assert call(core, "status")["active"] is None
    with pytest.raises(KeyboardInterrupt):
        run_sync(update(Control(Silent(core, method, KeyboardInterrupt()))))
    assert call(core, "status")["active"] is None
