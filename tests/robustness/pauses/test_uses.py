"""Pauses of several callers at once: updates in them, and clients and leases that end.

The checks are those of the cells, on one engine of a dense model.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.robustness.pauses import cells
from tests.robustness.pauses.live import Live, Stream
from tests.robustness.pauses.scene import params_of, prompt_of
from tests.robustness.pauses.subjects import NEW, OLD, Subject
from tests.robustness.pauses.test_oracle import DEVICES, wrong
from tests.support.preloaded_process import IS_ON_CPU
from tests.support.waiting import until
from vllm.inflight.calls import StartUpdate
from vllm.inflight.errors import InflightError, OwnedByAnother, PauseConflict
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.engine

NUM_UPDATES = {"cpu": 20, "cuda": 200}
NUM_RACES = {"cpu": 20, "cuda": 60}
NUM_TOKENS = 640 if IS_ON_CPU else 1600
"""Of a request through updates: a CPU has decoded 25 when the last one is served."""
LABELS = (NEW, OLD)
NUM_PAUSES = 9
MOST_LATE = 6
"""Tokens of a request after the call of a pause: of two steps that are under way, of
the one that is scheduled meanwhile, and those on their way to the client."""
OWNER = "rollout"
LEASE_S = 2.0


@pytest.fixture(scope="module")
def subject(subject_of: Any, device: str) -> Subject:
    found: Subject = subject_of(cells.DENSE, 1, DEVICES[device])
    return found


@pytest.fixture
def live(subject: Subject) -> Iterator[Live]:
    """The engine on the old weights, without a pause and without an update."""
    engine = subject.live
    load(subject, OLD)
    yield engine
    engine.call("continue_generation")
    if engine.call("weight_update_status")["active"] is not None:
        engine.call("abort_weight_update")


def load(subject: Subject, label: str, **options: Any) -> Any:
    folder = str(subject.folders[label])
    return subject.live.call("update_weights_from_disk", folder, label, **options)


def begun(live: Live, how_many: int = 4, num_tokens: int = NUM_TOKENS) -> list[Stream]:
    """Requests that run."""
    sent = []
    for number in range(how_many):
        params = params_of(cells.LONG, number)
        params.max_tokens = num_tokens
        sent.append(live.send(prompt_of(cells.LONG, number), params))
    live.until_begun(sent[:4], 4)
    return sent


def counts(sent: list[Stream]) -> list[int]:
    return [stream.num_tokens for stream in sent]


def flow_again(sent: list[Stream]) -> None:
    """Until every request that has not ended has a further token."""
    before = counts(sent)

    def came() -> bool:
        now = zip(sent, before, strict=True)
        return all(s.num_tokens > n or s.future.done() for s, n in now)

    until(came, "no token came")


def whole(sent: list[Stream], num_tokens: int) -> None:
    assert counts(sent) == [num_tokens] * len(sent)
    assert {stream.choices[0].finish_reason for stream in sent} == {"length"}


def test_updates_succeed_inside_pauses_of_another_owner(
    subject: Subject, live: Live, device: str
) -> None:
    sent: list[Stream] = []
    every: list[Stream] = []
    labels = []
    for number in range(NUM_UPDATES[device]):
        sent = [s for s in sent if not s.future.done()]
        if not sent:
            every += (sent := begun(live))
        assert live.pause("in_place", owner=OWNER)["paused"]
        label = LABELS[number % 2]
        assert load(subject, label)["weight_version"] == label
        labels.append(label)
        with pytest.raises(OwnedByAnother):
            live.call("continue_generation", owner="somebody else")
        assert live.call("is_paused"), "the update has ended a pause of another"
        live.call("continue_generation", owner=OWNER)
        flow_again(sent)
    live.wait(every)
    whole(every, NUM_TOKENS)
    num_changes = sum(len(s.choices[0].spans) - 1 for s in every)
    assert num_changes > len(labels) // 2, "the updates came between requests"
    assert wrong(subject, every, "in_place") == []
    assert live.call("get_weight_version") == labels[-1]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_decoding_goes_on_while_an_update_is_staged_that_began_in_the_pause(
    subject: Subject, live: Live, mode: str
) -> None:
    sent = begun(live)
    live.pause(mode)
    live.control("start", StartUpdate(transport="local"))
    live.call("continue_generation")
    flow_again(sent)
    info = {"path": str(subject.folders[NEW])}
    receiving = in_background(lambda: live.update_weights({"update_info": info}))
    flow_again(sent)
    live.pause(mode)  # no request ends before the commit
    receiving.result(timeout=60)
    live.call("finish_weight_update", NEW, mode=mode)
    live.call("continue_generation")
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    for stream in sent:
        assert [s.version for s in stream.choices[0].spans] == [OLD, NEW]
    assert wrong(subject, sent, mode) == []


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_takes_force_after_the_steps_that_are_under_way(
    subject: Subject, live: Live, mode: str
) -> None:
    sent = begun(live)
    late = []
    for _ in range(NUM_PAUSES):
        before = counts(sent)
        assert live.pause(mode)["paused"]
        live.settle()
        held = counts(sent)
        late.append(max(a - b for a, b in zip(held, before, strict=True)))
        time.sleep(0.05)  # ten steps of an engine that went on
        assert counts(sent) == held
        live.call("continue_generation")
        flow_again(sent)
    assert sorted(late)[NUM_PAUSES // 2] <= MOST_LATE, late
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    assert wrong(subject, sent, mode) == []


def test_an_abort_that_races_with_a_flip_leaves_one_whole_version(
    subject: Subject, live: Live, device: str
) -> None:
    sent: list[Stream] = []
    every: list[Stream] = []
    served, outcomes = OLD, []
    for number in range(NUM_RACES[device]):
        sent = [s for s in sent if not s.future.done()]
        if not sent:
            every += (sent := begun(live))
        label = OLD if served == NEW else NEW
        live.control("start", StartUpdate(transport="local"))
        live.update_weights({"update_info": {"path": str(subject.folders[label])}})
        live.call("prepare_weight_update")
        finishing = in_background(partial(live.call, "finish_weight_update", label))
        time.sleep(0.0005 * (number % 8))
        try:
            live.call("abort_weight_update")
        except InflightError as error:
            outcomes.append(error.code)
        else:
            outcomes.append("aborted")
        with suppress(InflightError):
            served = finishing.result(timeout=60)["weight_version"]
        assert live.call("get_weight_version") == served
        assert live.call("weight_update_status")["active"] is None
        flow_again(sent)
    print(outcomes)
    live.wait(every)
    whole(every, NUM_TOKENS)
    assert wrong(subject, every, "in_place") == []


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("gone", [0, 5], ids=["one-that-ran", "one-that-waited"])
def test_a_client_that_vanishes_in_a_pause_takes_only_its_request_along(
    subject: Subject, live: Live, mode: str, gone: int
) -> None:
    sent = begun(live, 6)
    before = live.pause(mode)
    live.settle()
    had = counts(sent)
    sent[gone].future.cancel()
    rest = [s for s in sent if s is not sent[gone]]

    def is_gone() -> bool:
        reply = live.pause(mode)
        num_left = reply["num_running"] + reply["num_waiting"]
        assert num_left >= len(rest), reply
        return bool(num_left == len(rest))

    assert before["num_running"] + before["num_waiting"] == len(sent)
    until(is_gone, "the request of a client that is gone is kept")
    load(subject, NEW)
    assert counts(sent) == had
    live.call("continue_generation")
    live.wait(rest)
    whole(rest, NUM_TOKENS)
    assert sent[gone].num_tokens == had[gone]
    assert wrong(subject, rest, mode) == []


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_decoding_goes_on_by_itself_when_the_lease_of_a_pause_runs_out(
    subject: Subject, live: Live, mode: str
) -> None:
    sent = begun(live)
    live.pause(mode, lease_s=600, owner=OWNER)
    load(subject, NEW)
    live.settle()
    asked = time.monotonic()
    live.pause(mode, lease_s=LEASE_S, owner=OWNER)
    flow_again(sent)
    arrivals = [at for s in sent for at, _ in s.choices[0].arrivals if at > asked]
    assert min(arrivals) - asked >= LEASE_S
    assert not live.call("is_paused")
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    assert wrong(subject, sent, mode) == []


def test_a_pause_becomes_stricter_under_requests_and_never_looser(
    subject: Subject, live: Live
) -> None:
    sent = begun(live)
    live.pause("in_place")
    assert live.pause("retract")["num_retracted"] == 4
    with pytest.raises(PauseConflict):
        live.pause("in_place")
    load(subject, NEW)
    live.call("continue_generation")
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    assert wrong(subject, sent, "retract") == []


@pytest.mark.parametrize("when", [cells.PAUSE, cells.COMMIT])
def test_a_flush_under_requests_whose_kv_is_kept_is_rejected(
    subject: Subject, live: Live, when: str
) -> None:
    if when == cells.COMMIT:  # staged before, for which requests may be too short
        live.control("start", StartUpdate(transport="local"))
        live.update_weights({"update_info": {"path": str(subject.folders[NEW])}})
        live.call("prepare_weight_update")
    sent = begun(live)
    options = {"mode": "in_place", "flush_cache": True}
    with pytest.raises(InflightError, match="retract"):
        if when == cells.PAUSE:
            live.call("pause_generation", **options)
        else:
            live.call("finish_weight_update", NEW, **options)
    assert not live.call("is_paused")
    assert live.call("get_weight_version") == OLD
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    assert wrong(subject, sent, "in_place") == []


def test_the_context_of_a_request_is_computed_anew_by_each_of_three_versions(
    subject: Subject, live: Live
) -> None:
    sent = begun(live)
    for label in (NEW, OLD, NEW):
        live.pause("retract")
        load(subject, label)
        live.call("continue_generation")
        flow_again(sent)
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    assert {len(s.choices[0].spans) for s in sent} == {4}
    assert wrong(subject, sent, "retract") == []
