"""The ledger: one update at a time, each id once, the last outcomes kept."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm.inflight.calls import StartUpdate
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update.ledger import NUM_OUTCOMES_KEPT, Ledger
from vllm.inflight.errors import (
    Conflict,
    DeadlineExceeded,
    Malformed,
    UnknownUpdate,
    UpdateBusy,
    WrongPhase,
)
from vllm.inflight.update import MOVES, Phase

PATH = {
    Phase.OPEN: [],
    Phase.STAGING: [Phase.STAGING],
    Phase.STAGED: [Phase.STAGING, Phase.STAGED],
    Phase.COMMITTED: [Phase.STAGING, Phase.STAGED, Phase.COMMITTED],
    Phase.ABORTED: [Phase.ABORTED],
    Phase.ROLLED_BACK: [
        *(Phase.STAGING, Phase.STAGED, Phase.COMMITTED, Phase.ROLLED_BACK)
    ],
}


def begun(ledger: Ledger, update_id: str = "u", **body: Any) -> Update:
    return ledger.start(StartUpdate(update_id, **body), 60.0)[0]


def brought_to(ledger: Ledger, phase: Phase, update_id: str = "u") -> Update:
    update = begun(ledger, update_id)
    for step in PATH[phase]:
        assert ledger.move(update, step)
    return update


# Ids


@pytest.mark.parametrize("phase", Phase)
def test_a_start_with_the_same_id_and_body_returns_the_update_in_any_phase(phase):
    ledger = Ledger()
    update = brought_to(ledger, phase)
    again, is_new = ledger.start(StartUpdate("u"), 1.0)
    assert again is update
    assert not is_new


@pytest.mark.parametrize("phase", Phase)
def test_the_same_id_with_another_body_is_a_conflict(phase):
    ledger = Ledger()
    brought_to(ledger, phase)
    with pytest.raises(Conflict) as refusal:
        begun(ledger, weight_version="v2")
    assert refusal.value.phase == phase
    assert "another body" in str(refusal.value)


def test_an_update_started_without_an_id_gets_a_new_id():
    ledger = Ledger()
    ids = set()
    for _ in range(3):
        update, is_new = ledger.start(StartUpdate(), 60.0)
        assert is_new
        ids.add(update.update_id)
        ledger.move(update, Phase.ABORTED)
    assert len(ids) == 3


@pytest.mark.parametrize("update_id", ["", 0, 3, ["u"], {"u": 1}, True, "x" * 129])
def test_an_invalid_update_id_is_rejected(update_id):
    with pytest.raises(Malformed, match="update_id"):
        Ledger().start(StartUpdate(update_id), 60.0)


def test_a_rejected_start_leaves_no_trace_in_the_ledger():
    ledger = Ledger()
    for body in ({"weight_version": ""}, {"manifest": []}):
        with pytest.raises(Malformed):
            ledger.start(StartUpdate("u", **body), 60.0)
    assert ledger.outcomes() == []
    assert begun(ledger).phase is Phase.OPEN


# One at a time


@pytest.mark.parametrize("phase", [Phase.OPEN, Phase.STAGING, Phase.STAGED])
def test_no_second_update_starts_while_one_is_active(phase):
    ledger = Ledger()
    first = brought_to(ledger, phase)
    with pytest.raises(UpdateBusy) as refusal:
        begun(ledger, "other")
    assert refusal.value.update_id == "u"
    assert ledger.active is first


@pytest.mark.parametrize("phase", [Phase.COMMITTED, Phase.ABORTED, Phase.ROLLED_BACK])
def test_an_update_can_start_after_the_last_one_has_ended(phase):
    ledger = Ledger()
    brought_to(ledger, phase)
    assert ledger.active is None
    other = begun(ledger, "other")
    assert ledger.active is ledger.find(None) is other


def test_only_one_of_many_simultaneous_starts_succeeds():
    ledger = Ledger()
    barrier = threading.Barrier(8)
    outcomes: list[str] = []

    def begin(number: int) -> None:
        barrier.wait()
        try:
            outcomes.append(begun(ledger, str(number)).update_id)
        except UpdateBusy:
            outcomes.append("busy")

    threads = [threading.Thread(target=begin, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("busy") == 7


def test_serials_grow_and_are_never_used_twice():
    ledger = Ledger()
    serials = []
    for number in range(5):
        serials.append(brought_to(ledger, Phase.ABORTED, str(number)).serial)
        serials.append(ledger.next_serial())
    assert serials == list(range(1, 11))


# Moves


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("to", Phase)
def test_a_phase_changes_if_and_only_if_the_transition_is_in_the_table(phase, to):
    ledger = Ledger()
    update = brought_to(ledger, phase)
    assert ledger.move(update, to) is (to in MOVES[phase])
    assert update.phase is (to if to in MOVES[phase] else phase)


def test_a_move_that_is_not_made_changes_nothing():
    ledger = Ledger()
    update = brought_to(ledger, Phase.COMMITTED)
    before = update.to_dict()
    assert not ledger.move(update, Phase.ABORTED, DeadlineExceeded("late"))
    assert update.to_dict() == before


def test_a_failed_update_returns_its_error_to_later_calls():
    ledger = Ledger()
    update = brought_to(ledger, Phase.STAGING)
    ledger.move(update, Phase.ABORTED, DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded) as refusal:
        ledger.require("u", Phase.STAGED)
    assert refusal.value.to_dict() == {
        "code": "deadline_exceeded",
        "message": "late",
        "remedy": DeadlineExceeded.remedy,
        "phase": "aborted",
        "update_id": "u",
    }


def test_a_call_in_the_wrong_phase_names_the_phases_that_the_call_needs():
    ledger = Ledger()
    brought_to(ledger, Phase.STAGING)
    with pytest.raises(WrongPhase, match=r"is staging.*needs it staged or committed"):
        ledger.require("u", Phase.STAGED, Phase.COMMITTED)


# Memory


def test_the_last_outcomes_are_kept_the_newest_first():
    ledger = Ledger()
    for number in range(NUM_OUTCOMES_KEPT + 6):
        brought_to(ledger, Phase.ABORTED, str(number))
    kept = [outcome["update_id"] for outcome in ledger.outcomes()]
    assert kept == [str(n) for n in range(NUM_OUTCOMES_KEPT + 5, 5, -1)]
    assert ledger.find("6").phase is Phase.ABORTED
    with pytest.raises(UnknownUpdate):
        ledger.find("5")
    begun(ledger, "under way")
    assert ledger.outcomes()[0]["phase"] == "open"


@pytest.mark.parametrize("update_id", [7, {}, ["u"], {"u": 1}])
def test_an_id_that_is_no_string_is_malformed(update_id):
    with pytest.raises(Malformed, match="update_id must be a string"):
        Ledger().find(update_id)


def test_a_call_without_an_id_refers_to_the_active_update_only():
    ledger = Ledger()
    with pytest.raises(WrongPhase, match="no weight update was started"):
        ledger.find(None)
    first = brought_to(ledger, Phase.STAGING, "first")
    assert ledger.find(None) is first
    ledger.move(first, Phase.ABORTED, DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded, match="late"):
        ledger.require(None, Phase.STAGING)  # nobody has been told so far
    with pytest.raises(WrongPhase) as refusal:
        ledger.require(None, Phase.STAGING)
    told = refusal.value.to_dict()
    for word in ("no update is open", "'first'", "ended as deadline_exceeded"):
        assert word in told["message"]
    assert "late" not in told["message"], "it is somebody else's failure"
    assert (told["update_id"], told["phase"]) == ("first", "aborted")
    with pytest.raises(DeadlineExceeded, match="late"):
        ledger.require("first", Phase.STAGING)
    second = begun(ledger, "second")
    begun(ledger, "second")
    assert ledger.find(None) is second


def test_an_ended_update_does_not_keep_its_manifest():
    """One of 100,000 tensors takes about 75 MB, and 64 updates are remembered."""
    entry = {"name": "w", "shape": [1], "dtype": "int8"}
    manifest = {"format": 1, "tensors": [entry], "step": 7}
    for end in (Phase.ABORTED, Phase.COMMITTED):
        ledger = Ledger()
        update = begun(ledger, manifest=manifest)
        for step in PATH[end]:
            ledger.move(update, step)
        held = [getattr(update, name) for name in Update.__slots__]
        assert "'w'" not in repr(held)
        assert update.to_dict()["step"] == 7
        assert begun(ledger, manifest=manifest) is update
        with pytest.raises(Conflict):
            begun(ledger, manifest=manifest | {"step": 8})


@given(st.floats(0.001, 1e6), st.sampled_from(list(Phase)))
def test_a_report_is_json_and_its_times_run_forward(deadline_s, phase):
    ledger = Ledger()
    update, _ = ledger.start(StartUpdate("u"), deadline_s)
    for step in PATH[phase]:
        ledger.move(update, step)
    seconds = update.to_dict()["seconds"]
    assert 0 <= seconds.get("staging", 0.0) <= seconds["total"]


class Life(RuleBasedStateMachine):
    """Any order of calls leaves at most one update under way."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    @rule(update_id=st.sampled_from("abc"), label=st.none() | st.sampled_from("xy"))
    def begin(self, update_id: str, label: str | None) -> None:
        try:
            update, is_new = self.ledger.start(StartUpdate(update_id, label), 60.0)
        except Conflict:
            return
        assert not is_new or update.phase is Phase.OPEN

    @rule(update_id=st.sampled_from("abc"), phase=st.sampled_from(list(Phase)))
    def move(self, update_id: str, phase: Phase) -> None:
        try:
            update = self.ledger.find(update_id)
        except UnknownUpdate:
            return
        before = update.phase
        assert self.ledger.move(update, phase) is (phase in MOVES[before])

    @invariant()
    def one_at_most_is_active(self) -> None:
        phases = [o["phase"] for o in self.ledger.outcomes()]
        assert sum(p in ("open", "staging", "staged") for p in phases) <= 1


TestLife = Life.TestCase


# While it is switched to


def test_no_deadline_ends_an_update_that_is_being_switched_to():
    ledger = Ledger()
    update = brought_to(ledger, Phase.STAGED)
    with ledger.held(update):
        assert not ledger.move(update, Phase.ABORTED, DeadlineExceeded("too late"))
        assert ledger.move(update, Phase.COMMITTED)
    assert update.error is None
    with pytest.raises(WrongPhase, match="is committed"), ledger.held(update):
        pass
    other = brought_to(ledger, Phase.STAGED, "v")
    with pytest.raises(RuntimeError), ledger.held(other):
        raise RuntimeError
    assert ledger.move(other, Phase.ABORTED)
