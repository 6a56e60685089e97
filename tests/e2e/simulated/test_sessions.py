"""Sessions whose input comes in chunks: whose KV they read, chunk after chunk."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from tests.support.engines.bare_core import Streams, add, call, prompt, request
from tests.support.simulated.core import publish_weights
from tests.support.simulated.load import KINDS
from vllm.inflight.engine.scheduling import scheduler
from vllm.inflight.engine.scheduling.aborted_sessions import (
    NUM_REMEMBERED,
    AbortedSessions,
    mark,
)
from vllm.inflight.engine.scheduling.request_state import RequestState
from vllm.inflight.engine.scheduling.version_stamp import KV_FIELD, Stamp

pytestmark = pytest.mark.engine

TEXT = prompt(1, 40)


class Told(Streams):
    """With what outputs say of KV: the positions at which that of an epoch begins."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.trails: dict[str, list[tuple[int, int]]] = {}

    def _groups(self) -> list[Any]:
        groups = super()._groups()
        for output in (each for group in groups for each in group.outputs):
            trail = (output.kv_transfer_params or {}).get(KV_FIELD)
            if trail is not None:
                self.trails[output.request_id] = [
                    (start, -1 if stamp is None else Stamp.decode(stamp).epoch)
                    for start, stamp in trail
                ]
        return groups


@pytest.fixture(params=["sync", "async"])
def core(make: Callable[..., EngineCore], request: Any) -> EngineCore:
    return make(**KINDS[request.param])


def say(
    core: EngineCore, text: list[int], *, is_first: bool = False, is_last: bool = False
) -> None:
    """A chunk of the session's input, or its end, as the front end sends it."""
    made = request("s", text, max_tokens=4, extra_args={"kv_versions": 1})
    made.resumable = not is_last
    if is_first:
        mark(made)
    if is_last:
        made.prompt_token_ids, made.arrival_time = [0], 0.0  # made before the first
    core.add_request(*core.preprocess_add_request(made))


def heard(core: EngineCore, streams: Told, count: int) -> int:
    """Step until the session has said so much; how many positions it has computed."""
    for _ in range(100):
        if len(streams.tokens.get("s", ())) >= count:
            break
        streams.step()
    assert len(streams.tokens["s"]) >= count
    streams.step(3)
    return core.scheduler.requests["s"].num_computed_tokens


def test_a_session_reports_the_kv_versions_of_every_chunk(core: EngineCore) -> None:
    epoch, streams = core.vllm_inflight.version.epoch, Told(core)
    say(core, list(TEXT))
    first = heard(core, streams, 4)
    assert streams.trails["s"] == [(0, epoch)]
    publish_weights(core, 1, "one")
    say(core, prompt(2, 30))
    second = heard(core, streams, 8)
    assert streams.trails["s"] == [(0, epoch), (first, epoch + 1)]
    publish_weights(core, 2, "two")
    say(core, prompt(3, 30))
    heard(core, streams, 12)
    assert streams.trails["s"] == [
        (0, epoch),
        (first, epoch + 1),
        (second, epoch + 2),
    ]
    say(core, [0], is_last=True)
    streams.step(3)
    assert core.scheduler.vllm_inflight.reports.told == {}


def between_chunks(core: EngineCore) -> Told:
    """A session that has said its first chunk's tokens, and waits with its second."""
    streams = Told(core)
    say(core, list(TEXT), is_first=True)
    streams.step(2)
    say(core, prompt(2, 30))  # queued behind the first
    session = core.scheduler.requests["s"]
    for _ in range(50):
        if session.status == RequestStatus.WAITING:
            break
        streams.step()
    assert session.num_computed_tokens > 0
    return streams


def test_a_session_holds_kv_while_its_next_chunk_waits(core: EngineCore) -> None:
    between_chunks(core)
    (held,) = core.scheduler.vllm_inflight.waiting.holding_kv()
    assert held.request_id == "s"
    assert core.scheduler.vllm_inflight.waiting.all() == []
    assert "streaming session" in core.inflight("flush", {})["error"]["message"]
    refused = core.inflight("pause", {"mode": "retract"})["error"]["message"]
    assert "streaming session" in refused


def test_a_pause_that_waits_lets_a_session_end_a_chunk_that_has_come(
    core: EngineCore,
) -> None:
    streams = between_chunks(core)
    paused = core.inflight("pause", {"mode": "wait"})
    assert isinstance(paused, Future) and not paused.done()
    for _ in range(50):
        if paused.done():
            break
        streams.step()
    assert paused.result(timeout=0)["ok"]["paused"] is True
    assert len(streams.tokens["s"]) == 8
    add(core, "other", prompt(3))
    assert "other" not in streams.step(5).tokens
    call(core, "resume")
    say(core, [0], is_last=True)
    streams.run()


def aborted(core: EngineCore, *, is_idle: bool) -> Told:
    """A session that the engine has ended, between two chunks or in the first."""
    streams = Told(core)
    say(core, list(TEXT), is_first=True)
    heard(core, streams, 4) if is_idle else streams.step(2)
    if not is_idle:
        say(core, prompt(2, 30))  # queued behind the first
    paused = core.inflight("pause", {"mode": "abort"})
    streams.step(3)
    assert not isinstance(paused, Future) or paused.done()
    call(core, "resume")
    return streams


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_late_chunk_of_an_aborted_session_begins_no_request(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, is_idle: bool, is_last: bool
) -> None:
    streams = aborted(core, is_idle=is_idle)
    said = len(streams.tokens.get("s", ()))
    # It waited behind a turn that took an hour.
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    monkeypatch.setattr(scheduler, "time", later)
    say(core, prompt(3, 30), is_last=is_last)
    streams.step(3)
    assert len(streams.tokens.get("s", ())) == said
    assert not core.scheduler.has_requests()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("text", [[0], TEXT], ids=["short", "long"])
def test_a_request_may_have_the_id_of_a_session_that_was_aborted(
    core: EngineCore, text: list[int], is_late: bool
) -> None:
    streams = aborted(core, is_idle=True)
    if is_late:
        say(core, prompt(3, 30))
    said = len(streams.tokens["s"])
    add(core, "s", list(text), max_tokens=4)
    assert len(streams.run().tokens["s"]) == said + 4


@pytest.mark.parametrize("is_late", [False, True])
def test_a_new_session_may_reuse_the_id_of_an_aborted_session(
    core: EngineCore, is_late: bool
) -> None:
    streams = aborted(core, is_idle=False)
    if is_late:
        say(core, prompt(3, 30))
        say(core, [0], is_last=True)
    said = len(streams.tokens.get("s", ()))
    say(core, list(TEXT), is_first=True)
    heard(core, streams, said + 4)
    say(core, prompt(2, 30))
    heard(core, streams, said + 8)
    say(core, [0], is_last=True)
    streams.step(3)
    assert not core.scheduler.has_requests()


def test_a_session_that_has_ended_by_itself_is_not_remembered(core: EngineCore) -> None:
    streams = Told(core)
    for count in (4, 8):
        say(core, list(TEXT))  # of a front end that marks nothing
        heard(core, streams, count)
        say(core, [0], is_last=True)
        streams.step(3)
        assert not core.scheduler.has_requests()


def test_the_last_thousand_sessions_that_were_aborted_are_remembered() -> None:
    aborted = AbortedSessions()

    def chunk(number: int) -> Any:
        params = SimpleNamespace(extra_args=None)
        made = SimpleNamespace(request_id=f"s{number}", resumable=True)
        made.arrival_time, made.sampling_params = 1.0, params
        return made

    for number in range(NUM_REMEMBERED):
        aborted.add(chunk(number))
    aborted.add(chunk(0))  # once more, which makes it the newest
    aborted.add(chunk(NUM_REMEMBERED))
    found = [aborted.is_late(chunk(n)) for n in range(NUM_REMEMBERED + 1)]
    assert found == [True, False, *[True] * (NUM_REMEMBERED - 1)]


def test_a_request_that_reads_a_sessions_blocks_reports_their_kv_version(
    core: EngineCore,
) -> None:
    epoch, streams = core.vllm_inflight.version.epoch, Told(core)
    say(core, list(TEXT))
    heard(core, streams, 4)
    say(core, prompt(2, 30))
    heard(core, streams, 8)
    add(core, "other", [*TEXT, 0], extra_args={"kv_versions": 1})
    streams.step(8)
    assert RequestState.of(core.scheduler.requests["other"]).num_found == 32
    assert streams.trails["other"] == [(0, epoch)]
    say(core, [0], is_last=True)
    streams.run()
