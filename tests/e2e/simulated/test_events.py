"""The log of an engine: one line for each thing that happens, and how long it took."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from tests.support.simulated.core import publish_weights, stage_weights
from tests.support.simulated.load import ask, started
from tests.support.waiting import until
from vllm.inflight.engine import event_log
from vllm.inflight.errors import WeightsMismatch

pytestmark = pytest.mark.engine

TOOK = re.compile(r" \(\d+\.\d{3} s\)$")


class Lines(logging.Handler):
    """What was logged, with its level."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append((record.levelname, record.getMessage()))

    @property
    def texts(self) -> list[str]:
        return [TOOK.sub("", text) for _, text in self.told]

    def starts(self, *beginnings: str) -> bool:
        return len(self.told) == len(beginnings) and all(
            text.startswith(start)
            for text, start in zip(self.texts, beginnings, strict=True)
        )


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, level = Lines(), event_log.logger.level
    event_log.logger.addHandler(handler)
    event_log.logger.setLevel(logging.DEBUG)
    yield handler
    event_log.logger.removeHandler(handler)
    event_log.logger.setLevel(level)


def test_a_version_is_begun_staged_committed_and_rolled_back(
    core: EngineCore, lines: Lines
) -> None:
    publish_weights(core, 1, "one")
    lines.told.clear()
    begin = {"update_id": "u", "weight_version": "two", "owner": "ann"}
    call(core, "start", transport="local", deadline_s=9, **begin)
    call(core, "receive", update_info={"weights": 2})
    call(core, "prepare")
    call(core, "commit")
    call(core, "rollback")
    update = "update 'u' (version 'two')"
    assert lines.starts(
        f"{update} begun by 'ann': transport local, deadline in 9 s",
        f"{update} staged: digest {2:032x}, 0.0 MB on all ranks",
        f"{update} committed: epoch ",
        "rolled back from version 'two' to 'one': epoch ",
    ), lines.told
    assert all(TOOK.search(text) for _, text in lines.told)
    assert {level for level, _ in lines.told} == {"INFO"}


def test_rejected_and_aborted_updates_are_logged_as_warnings(
    core: EngineCore, lines: Lines
) -> None:
    call(core, "start", update_id="a", transport="local")
    call(core, "abort")
    call(core, "start", update_id="b", transport="local")
    core.vllm_inflight.updates.ledger.active.deadline = 0.0
    until(lambda: any("'b' aborted" in text for _, text in lines.told))
    call(core, "start", update_id="c", transport="local")
    refusal = WeightsMismatch("1 tensor is missing").to_dict()
    call(core, "abort", error=refusal)
    ends = [pair for pair in lines.told if "begun" not in pair[1]]
    assert [level for level, _ in ends] == ["WARNING"] * 3
    texts = [TOOK.sub("", text) for _, text in ends]
    assert texts[0] == "update 'a' aborted"
    assert texts[1].startswith("update 'b' aborted: deadline_exceeded: ")
    assert texts[2] == "update 'c' refused: weights_mismatch: 1 tensor is missing"


def test_a_rejected_commit_or_rollback_is_logged(
    core: EngineCore, lines: Lines
) -> None:
    stage_weights(core, 1)
    update = call(core, "status")["active"]["update_id"]
    lines.told.clear()
    core.inflight("commit", {"expect_version": "nobody's"})
    call(core, "abort", update_id=update)
    core.inflight("rollback", {})
    assert lines.starts(
        f"update {update!r} not committed, it stays staged: version_conflict: ",
        f"update {update!r} aborted",
        "rollback to None not made: nothing_to_roll_back: ",
    ), lines.told


def test_a_pause_and_its_end_are_logged_once_despite_renewals(
    core: EngineCore, lines: Lines
) -> None:
    streams = started(core)
    for _ in range(3):
        paused = ask(core, "pause", mode="in_place", owner="ann", lease_s=60)
        streams.step(3)
        assert paused.done()
    ask(core, "pause", mode="retract", owner="ann")
    streams.step(3)
    call(core, "resume")
    call(core, "resume")
    assert lines.starts(
        "paused by 'ann' in mode in_place: 3 requests running, 0 waiting",
        "paused by 'ann' in mode retract: 0 requests running, 3 waiting",
        "continued, after a pause in mode retract",
    ), lines.told


@pytest.mark.parametrize(
    ("level", "told"),
    [
        ("off", []),
        ("warning", ["WARNING", "WARNING"]),
        ("debug", ["DEBUG", "WARNING"]),
    ],
)
def test_the_log_level_flag_sets_the_level_of_the_events(
    make: Any, lines: Lines, level: str, told: list[str]
) -> None:
    core = make(inflight={"log_level": level})
    lines.told.clear()
    call(core, "start", transport="local")
    call(core, "abort")
    assert [level for level, _ in lines.told] == told
