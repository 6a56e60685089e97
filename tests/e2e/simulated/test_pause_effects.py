"""What a pause does to requests, and what a commit under one does."""

from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from tests.support.engines.bare_core import Streams, add, call, prompt, request
from tests.support.simulated.core import (
    assert_told_truly,
    publish_weights,
    stage_weights,
)
from tests.support.simulated.load import KINDS, LABELS, answered, ask, count, started

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_no_token_comes_during_a_pause_and_none_is_lost_or_doubled(
    make: Callable[..., EngineCore], kind: str, mode: str
) -> None:
    core = make(**KINDS[kind])
    streams = started(core, count=4, length=90)  # the later ones are half prefilled
    stage_weights(core, 1)
    paused = ask(core, "pause", mode=mode)
    streams.step(3)
    reply = answered(paused)["ok"]
    before = count(streams)
    streams.step(10)
    assert count(streams) == before
    call(core, "commit", weight_version="one")
    add(core, "late", prompt(9))
    streams.step(5)
    assert count(streams) == before
    assert call(core, "paused")["mode"] == mode
    call(core, "resume")
    streams.run()
    assert {len(tokens) for tokens in streams.tokens.values()} == {40}
    assert_told_truly(core, streams, LABELS.get)
    sampled = core.model_executor.sampled
    ends = [set(sampled[name][-1].kv) for name in ("r0", "r1", "r2", "r3")]
    if mode == "retract":
        assert reply["num_retracted"] > 0
        assert ends == [{1}] * 4, "KV of the old weights was kept"
    else:
        assert {0, 1} in ends, "KV was not kept"
    assert set(sampled["late"][0].kv) == {1}
    assert core.scheduler.get_kv_cache_usage() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_commit_under_load_stamps_every_token_with_its_weights(
    make: Callable[..., EngineCore], kind: str, mode: str
) -> None:
    core = make(**KINDS[kind])
    streams = started(core, count=4, length=90)
    publish_weights(core, 1, "one", mode=mode)
    streams.step(5)
    add(core, "late", prompt(9))
    streams.run()
    assert_told_truly(core, streams, LABELS.get)
    assert set(streams.stamps["late"]) == {"one"}
    if mode != "abort":
        assert {len(tokens) for tokens in streams.tokens.values()} == {40}


def test_aborted_requests_end_with_their_tokens_and_their_own_ids(
    core: EngineCore,
) -> None:
    streams = started(core)
    before = {name: list(tokens) for name, tokens in streams.tokens.items()}
    answer = ask(core, "pause", mode="abort")
    streams.step(3)
    assert answered(answer)["ok"]["num_aborted"] == 3
    assert streams.finished == dict.fromkeys(["r0", "r1", "r2"], "abort")
    assert streams.tokens == before
    call(core, "resume")
    # Sent again with what they had, they go on as if nothing had happened.
    for seed, tokens in enumerate(before.values()):
        left = 40 - len(tokens)
        add(core, f"again{seed}", prompt(seed) + tokens, max_tokens=left)
    streams.run()
    whole = [before[f"r{seed}"] + streams.tokens[f"again{seed}"] for seed in range(3)]
    for seed in range(3):
        add(core, f"whole{seed}", prompt(seed))
    streams.run()
    assert whole == [streams.tokens[f"whole{seed}"] for seed in range(3)]


def test_requests_that_arrive_during_a_pause_run_in_order_afterwards(
    core: EngineCore,
) -> None:
    streams = started(core)
    ask(core, "pause", mode="retract")
    streams.step(3)
    for name in "abc":
        add(core, name, prompt(ord(name)), max_tokens=3)
    queue = [each.request_id for each in core.scheduler.waiting]
    assert queue == ["r0", "r1", "r2", "a", "b", "c"]
    call(core, "resume")
    streams.run()
    assert list(streams.finished)[:3] == ["a", "b", "c"]


def test_retraction_keeps_the_order_of_priorities(
    make: Callable[..., EngineCore],
) -> None:
    core = make(scheduling_policy="priority", max_num_seqs=3)
    for name, priority in (("low", 9), ("first", 1), ("second", 1), ("late", 5)):
        made = request(name, prompt(ord(name[0])))
        made.priority = priority
        core.add_request(*core.preprocess_add_request(made))
    Streams(core).step(8)
    running = {each.request_id for each in core.scheduler.running}
    assert running == {"first", "second", "late"}
    call(core, "pause", mode="retract")
    queue = [each.request_id for each in core.scheduler.waiting]
    assert queue == ["first", "second", "late", "low"]


def test_requests_whose_kv_cannot_be_computed_again_are_named(
    core: EngineCore,
) -> None:
    streams = started(core, count=1)
    session = request("session", prompt(5))
    session.resumable = True
    core.add_request(*core.preprocess_add_request(session))
    streams.step(3)
    later = request("later", prompt(5))
    later.resumable = True
    core.add_request(*core.preprocess_add_request(later))
    add(core, "remote", prompt(6))
    core.scheduler.requests["remote"].status = RequestStatus.WAITING_FOR_REMOTE_KVS
    stage_weights(core, 1)
    for method in ("pause", "commit"):
        refused = core.inflight(method, {"mode": "retract"})["error"]
        assert refused["code"] == "pause_conflict"
        assert "request 'session' (in a streaming session)" in refused["message"]
        assert "'remote' (waiting for remote KV)" in refused["message"]
    assert call(core, "paused")["is_paused"] is False
    core.scheduler.requests["remote"].status = RequestStatus.WAITING
    streams.run()


@pytest.mark.parametrize("kind", ["async", "pipeline"])
def test_no_request_overtakes_requests_retracted_with_steps_in_flight(
    make: Callable[..., EngineCore], kind: str
) -> None:
    core = make(**KINDS[kind])
    streams = started(core)
    add(core, "late", prompt(9))
    assert core.batch_queue, "no step is in flight"
    publish_weights(core, 1, "one", mode="retract")
    for _ in range(8):
        scheduler = core.scheduler
        waiting = scheduler.vllm_inflight.waiting.all()
        queue = [each.request_id for each in (*scheduler.running, *waiting)]
        assert queue == ["r0", "r1", "r2", "late"]
        streams.step()
    assert_told_truly(core, streams.run(), LABELS.get)
