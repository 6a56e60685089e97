"""The engines of one front end commit only if all have staged the same."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engines.bare_core import call
from tests.support.simulated.doors import Door, publish, served
from vllm.inflight.api.control.control import Control
from vllm.inflight.calls import Call, ReceiveChunk, StartUpdate
from vllm.inflight.errors import InflightError, VersionConflict, WeightsMismatch
from vllm.inflight.worker.status_board import StatusBoard

pytestmark = pytest.mark.engine


class Apart(Door):
    """Each engine reads files of its own; what they are called, all are told."""

    def __init__(self, cores: list[Any], *weights: int) -> None:
        super().__init__(cores)
        self.weights = weights
        self.called: list[str] = []

    async def call(self, asked: Call) -> list[Any]:
        self.called.append(asked.name)
        if not isinstance(asked, ReceiveChunk):
            return await super().call(asked)
        answers = []
        for core, weights in zip(self._cores, self.weights, strict=True):
            sent = replace(asked, update_info={"weights": weights})
            answers += await Door([core]).call(sent)
        return answers


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of whole versions are not known, as of a subset on top of the start."""
    post = StatusBoard.post

    def post_what_was_sent(
        self: StatusBoard, rank: int, notice: dict[str, Any]
    ) -> None:
        if notice["state"] == "staged":
            notice = notice | {"sent": notice["digest"], "digest": None}
        post(self, rank, notice)

    monkeypatch.setattr(StatusBoard, "post", post_what_was_sent)


def prepare(control: Control) -> Any:
    async def phases() -> Any:
        started = await control.start(StartUpdate(transport="local"))
        await control.update({"weights": 1}, started["update_id"])
        return await control.prepare(started["update_id"])

    return asyncio.run(phases())


def refused(control: Control, error: type[InflightError] = WeightsMismatch) -> str:
    with pytest.raises(error) as caught:
        publish(control, 1, "new")
    return str(caught.value)


def test_engines_that_read_different_files_commit_nothing(cores: list[Any]) -> None:
    door = Apart(cores, 1, 2)
    told = refused(Control(door))
    assert "commit" not in door.called
    assert served(cores) == [("default", 0)] * 2
    for name in ("engine 0", "engine 1", f"{1:032x}", f"{2:032x}"):
        assert name in told
    for core in cores:
        outcome = call(core, "status")["outcomes"][0]
        assert outcome["phase"] == "aborted"
        assert outcome["error"]["code"] == "weights_mismatch"
    publish(Control(Apart(cores, 3, 3)), 3, "both")
    assert served(cores) == [("both", 3)] * 2


def test_a_prepare_commits_nothing_and_reports_the_digest(cores: list[Any]) -> None:
    control = Control(Door(cores))
    told = prepare(control)
    assert (told["phase"], told["digest"]) == ("staged", f"{1:032x}")
    assert served(cores) == [("default", 0)] * 2
    assert asyncio.run(control.prepare(told["update_id"])) == told
    asyncio.run(control.finish("one", update_id=told["update_id"]))
    assert served(cores) == [("one", 1)] * 2
    again = asyncio.run(control.prepare(told["update_id"]))
    assert (again["phase"], again["digest"]) == ("committed", told["digest"])


def test_a_prepare_fails_if_the_engines_staged_different_weights(
    cores: list[Any],
) -> None:
    with pytest.raises(WeightsMismatch, match="different weights"):
        prepare(Control(Apart(cores, 1, 2)))
    assert [call(core, "status")["active"] for core in cores] == [None, None]


def test_the_sent_tensors_are_compared_without_a_digest(
    cores: list[Any], unknown: None
) -> None:
    told = refused(Control(Apart(cores, 1, 2)))
    assert f"no known digest, and tensors {1:032x} on top of weights start" in told
    publish(Control(Apart(cores, 3, 3)), 3, "both")
    assert served(cores) == [("both", 3)] * 2


def test_the_base_is_compared_without_a_digest(cores: list[Any], unknown: None) -> None:
    publish(Control(Apart(cores, 1, 1)), 1, "one")
    publish(Control(Door(cores[1:])), 2, "aside")
    told = refused(Control(Apart(cores, 3, 3)))
    assert told.count("on top of weights") == 2
    assert served(cores) == [("one", 1), ("aside", 2)]


def test_weights_written_out_of_band_match_no_base_that_another_engine_knows(
    cores: list[Any], unknown: None
) -> None:
    cores[0].vllm_inflight.live_version.reset()
    refused(Control(Apart(cores, 3, 3)))
    cores[1].vllm_inflight.live_version.reset()
    publish(Control(Apart(cores, 3, 3)), 3, "both")
    assert served(cores) == [("both", 3)] * 2


def test_a_known_digest_does_not_match_an_unknown_one(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    post = StatusBoard.post
    second = cores[1].model_executor.board

    def post_less(self: StatusBoard, rank: int, notice: dict[str, Any]) -> None:
        if self is second and notice["state"] == "staged":
            notice = notice | {"digest": None}
        post(self, rank, notice)

    monkeypatch.setattr(StatusBoard, "post", post_less)
    told = refused(Control(Apart(cores, 1, 1)))
    assert f"engine 0 has digest {1:032x}" in told
    assert "engine 1 has no known digest" in told


def test_engines_roll_back_only_to_one_common_version(cores: list[Any]) -> None:
    control = Control(Door(cores))
    publish(control, 1, "one")
    publish(Control(Door(cores[1:])), 3, "aside")
    publish(control, 2, "two")
    with pytest.raises(VersionConflict, match="'one', 'aside'"):
        asyncio.run(control.rollback())
    assert served(cores) == [("two", 2)] * 2
    publish(control, 4, "four")
    asyncio.run(control.rollback())
    assert served(cores) == [("two", 2)] * 2


def test_a_rollback_compares_the_weights_of_versions_with_equal_labels(
    cores: list[Any],
) -> None:
    control = Control(Door(cores))
    publish(Control(Door(cores[:1])), 1, "one")
    publish(Control(Door(cores[1:])), 3, "one")
    publish(control, 2, "two")
    with pytest.raises(VersionConflict, match="different weights"):
        asyncio.run(control.rollback("one"))
    assert served(cores) == [("two", 2)] * 2
