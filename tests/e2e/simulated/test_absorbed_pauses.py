"""Absorbed pauses: decoding goes on, and stops before anything that needs the pause."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import (
    Streams,
    add,
    call,
    end_lease,
    prompt,
    request,
)
from tests.support.simulated.core import (
    assert_told_truly,
    publish_weights,
    stage_weights,
)
from tests.support.simulated.load import (
    KINDS,
    LABELS,
    answered,
    ask,
    code,
    count,
    started,
)
from tests.support.waiting import until
from vllm.inflight.engine.pause import absorption
from vllm.inflight.engine.pause.absorption import Need
from vllm.inflight.update import PAUSE_MOVES, PauseMode

pytestmark = pytest.mark.engine

ABSORB = {"inflight": {"pauses": "absorb"}}
ABSORBED = [PauseMode.IN_PLACE, PauseMode.RETRACT]


@pytest.fixture
def core(make: Callable[..., EngineCore]) -> EngineCore:
    """A core that absorbs pauses, with a loop and two steps in flight."""
    return make(is_async=True, **ABSORB)


def settled(streams: Streams, answer: Any) -> Any:
    """What a call comes to, while the loop goes on."""
    if not isinstance(answer, Future):
        return answer
    for _ in range(50):
        if answer.done():
            break
        streams.step()
    return answer.result(timeout=0)


def enforced(core: EngineCore) -> dict[str, int]:
    return dict(core.vllm_inflight.counts.enforced)


def is_frozen(core: EngineCore, streams: Streams) -> bool:
    """Whether no token comes, and `is_paused` says that the pause is in force."""
    num_tokens = count(streams.step(3))  # what came out of the last steps
    state = call(core, "paused")
    assert state["is_paused"] is True
    return count(streams.step(6)) == num_tokens and not state["absorbed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ABSORBED)
def test_tokens_come_between_pause_and_continue_and_have_the_right_versions(
    make: Callable[..., EngineCore], kind: str, mode: PauseMode
) -> None:
    core = make(**KINDS[kind], **ABSORB)
    streams = started(core)
    reply = answered(ask(core, "pause", mode=mode))["ok"]
    assert (reply["paused"], reply["mode"], reply["absorbed"]) == (True, mode, True)
    before = count(streams)
    assert count(streams.step(5)) > before
    publish_weights(core, 1, "one")
    before = count(streams)
    assert count(streams.step(5)) > before
    state = call(core, "paused")
    assert (state["is_paused"], state["mode"], state["absorbed"]) == (True, mode, True)
    reply = call(core, "resume")
    assert (reply["paused"], reply["mode"], reply["absorbed"]) == (False, None, False)
    assert_told_truly(core, streams.run(), LABELS.get)
    assert {"default", "one"} == set(streams.stamps["r0"])
    assert enforced(core).get(Need.WORKER_CALL) is None
    made = core.model_executor.sampled["r0"]
    of_new = [sample for sample in made if sample.weights == 1]
    is_whole = all(w == 1 for sample in of_new for w in sample.kv)
    assert is_whole is (mode is PauseMode.RETRACT)


def test_without_the_flag_a_pause_stops_decoding(
    make: Callable[..., EngineCore],
) -> None:
    core = make(is_async=True)
    streams = started(core)
    answer = ask(core, "pause", mode="in_place")
    assert settled(streams, answer)["ok"]["absorbed"] is False
    assert is_frozen(core, streams)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.WAIT])
def test_abort_and_wait_are_never_absorbed(core: EngineCore, mode: PauseMode) -> None:
    streams = started(core)
    answer = ask(core, "pause", mode=mode)
    streams.step(60)
    assert answered(answer)["ok"]["absorbed"] is False
    add(core, "late", prompt(9))
    assert "late" not in streams.step(5).tokens
    call(core, "resume")
    assert len(streams.run().tokens["late"]) == 40


def worker_call(core: EngineCore) -> Any:
    return core.collective_rpc("tests_note")


def reload(core: EngineCore) -> Any:
    return core.collective_rpc("reload_weights", args=(2,))


def checksums(core: EngineCore) -> Any:
    return core.collective_rpc("compute_weight_checksums")


def save(core: EngineCore) -> Any:
    return core.save_sharded_state("/nowhere")


def sleep(core: EngineCore) -> Any:
    return core.sleep(1, "keep")


def release(core: EngineCore) -> Any:
    return core.inflight("release", {"tags": ["weights", "kv_cache"]})


def reset(core: EngineCore) -> Any:
    return core.reset_prefix_cache(True)


NEEDS: dict[Callable[[EngineCore], Any], tuple[Need, str]] = {
    worker_call: (Need.WORKER_CALL, "_tests_note"),
    reload: (Need.WORKER_CALL, "_reload_weights"),
    checksums: (Need.WORKER_CALL, "_compute_weight_checksums"),
    save: (Need.SAVE, "save_sharded_state"),
    sleep: (Need.SLEEP, "sleep"),
    release: (Need.RELEASE, "sleep"),
    reset: (Need.CACHE_RESET, "reset_prefix_cache"),
}
"""What needs a pause, the name that is counted, and where it happens."""


@pytest.mark.parametrize("mode", ABSORBED)
@pytest.mark.parametrize("kind", ["async", "pipeline", "async, in process"])
@pytest.mark.parametrize("act", NEEDS)
def test_the_pause_takes_force_before_what_needs_it_happens(
    make: Callable[..., EngineCore],
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[EngineCore], Any],
    kind: str,
    mode: PauseMode,
) -> None:
    core = make(**KINDS[kind], **ABSORB)
    before = enforced(core)
    streams = started(core)
    answered(ask(core, "pause", mode=mode, owner="trainer"))
    need, place = NEEDS[act]
    owner: Any = core.scheduler if act is reset else core.model_executor
    usual = getattr(owner, place, lambda *_, **__: True)
    seen = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append((core.is_scheduler_paused(), len(core.batch_queue or ())))
        return usual(*args, **kwargs)

    monkeypatch.setattr(owner, place, noting, raising=False)
    if act in (release, sleep):
        model = core.vllm_config.model_config
        monkeypatch.setattr(model, "enable_sleep_mode", True)
    answer = act(core)
    is_refused = act is release and mode is PauseMode.IN_PLACE
    found = settled(streams, answer)
    if is_refused:
        assert code(found) == "pause_conflict" and not seen
    else:
        assert seen and set(seen) == {(True, 0)}
    assert enforced(core).get(need, 0) == before.get(need, 0) + 1
    assert is_frozen(core, streams)
    assert call(core, "paused")["owner"] == "trainer"
    if core.model_executor.is_sleeping:
        core.wake_up()
        assert is_frozen(core, streams)
    call(core, "resume", owner="trainer")
    streams.run()
    assert count(streams) == 120
    last = streams.stamps["r0"][-1]
    assert_told_truly(core, streams, lambda weights: last if weights else "default")


def test_harmless_calls_and_plain_resets_leave_the_pause_absorbed(
    core: EngineCore,
) -> None:
    streams = started(core)
    answered(ask(core, "pause", mode="in_place"))
    core.collective_rpc("synchronize_device")
    assert core.reset_prefix_cache() is False, "requests hold blocks"
    assert code(core.inflight("flush", {})) == "pause_conflict"
    call(core, "info")
    call(core, "requests")
    assert call(core, "paused")["absorbed"] is True
    assert count(streams.run()) == 120


def test_a_flush_finds_the_requests_of_a_pause_retract_without_kv(
    core: EngineCore,
) -> None:
    streams = started(core)
    answered(ask(core, "pause", mode="retract"))
    found = settled(streams, core.inflight("flush", {}))["ok"]
    assert (found["num_running"], found["paused"]) == (0, True)
    assert found["dropped"]["blocks"] >= 0
    assert is_frozen(core, streams)
    assert enforced(core)[Need.CACHE_RESET] >= 1


def test_upstreams_keep_that_clears_the_cache_retracts_and_drops_at_the_commit(
    core: EngineCore,
) -> None:
    streams = started(core)
    reply = answered(ask(core, "pause", mode="retract", flush_cache=True))["ok"]
    assert (reply["num_retracted"], reply["dropped"]) == (0, None)
    assert "next commit" in reply["not_dropped"]
    before = count(streams)
    assert count(streams.step(5)) > before
    result = publish_weights(core, 1, "one", mode="in_place")
    assert result["num_retracted"] == 3
    assert "dropped" in result
    call(core, "resume")
    assert_told_truly(core, streams.run(), LABELS.get)
    made = [s for s in core.model_executor.sampled["r1"] if s.weights == 1]
    assert made and all(w == 1 for sample in made for w in sample.kv)


def test_a_rollback_under_an_absorbed_retract_retracts(core: EngineCore) -> None:
    publish_weights(core, 1, "one")
    streams = started(core)
    answered(ask(core, "pause", mode="retract"))
    assert call(core, "rollback")["num_retracted"] == 3
    call(core, "resume")
    assert_told_truly(core, streams.run(), LABELS.get)


@pytest.mark.parametrize("first", ABSORBED)
@pytest.mark.parametrize("second", PauseMode)
def test_an_absorbed_pause_becomes_stricter_or_the_call_is_rejected(
    core: EngineCore, first: PauseMode, second: PauseMode
) -> None:
    streams = started(core)
    answered(ask(core, "pause", mode=first))
    streams.step(2)
    answer = ask(core, "pause", mode=second)
    streams.step(5)
    state = call(core, "paused")
    if second not in PAUSE_MOVES[first]:
        assert code(answered(answer)) == "pause_conflict"
        assert (state["mode"], state["absorbed"]) == (first, True)
    else:
        reply = answered(answer)["ok"]
        assert (reply["mode"], state["mode"]) == (second, second)
        assert state["absorbed"] is (second in ABSORBED)
    if second is PauseMode.ABORT:
        assert set(streams.finished.values()) == {"abort"}
    call(core, "resume")
    assert_told_truly(core, streams.run(), LABELS.get)


def test_one_continue_ends_nested_pauses_and_a_second_one_does_nothing(
    core: EngineCore,
) -> None:
    before = core.vllm_inflight.counts.num_absorbed
    streams = started(core)
    for _ in range(2):
        answered(ask(core, "pause", mode="in_place"))
    assert core.vllm_inflight.counts.num_absorbed == before + 1
    assert call(core, "resume")["paused"] is False
    assert call(core, "resume")["paused"] is False
    assert count(streams.run()) == 120


def test_a_pause_that_took_force_is_renewed_and_not_absorbed_again(
    core: EngineCore,
) -> None:
    streams = started(core)
    answered(ask(core, "pause", mode="in_place"))
    settled(streams, worker_call(core))
    again = settled(streams, ask(core, "pause", mode="in_place"))["ok"]
    assert (again["paused"], again["absorbed"]) == (True, False)
    assert is_frozen(core, streams)


def test_a_pause_whose_lease_runs_out_was_absorbed_to_its_end(
    core: EngineCore,
) -> None:
    streams = started(core)
    expired = call(core, "paused")["leases_expired"]
    answered(ask(core, "pause", mode="in_place", lease_s=600, owner="trainer"))
    assert call(core, "paused")["owner"] == "trainer"
    end_lease(core)

    def has_ended() -> bool:
        streams.step()
        return not call(core, "paused")["is_paused"]

    until(has_ended)
    state = call(core, "paused")
    assert (state["leases_expired"], state["owner"]) == (expired + 1, None)
    assert count(streams.run()) == 120


def test_the_lease_of_a_pause_that_took_force_still_ends_it(core: EngineCore) -> None:
    streams = started(core)
    answered(ask(core, "pause", mode="in_place", lease_s=600))
    settled(streams, worker_call(core))
    assert is_frozen(core, streams)
    assert 0 < call(core, "paused")["lease_left_s"] <= 600
    end_lease(core)

    def goes_on() -> bool:
        streams.step()
        return not call(core, "paused")["is_paused"]

    until(goes_on)
    assert count(streams.run()) == 120


def test_another_owner_cannot_end_or_change_an_absorbed_pause(core: EngineCore) -> None:
    streams = started(core)
    answered(ask(core, "pause", mode="in_place", owner="trainer"))
    assert code(core.inflight("resume", {"owner": "other"})) == "owned_by_another"
    other = {"mode": "abort", "owner": "other"}
    assert code(core.inflight("pause", other)) == "owned_by_another"
    assert call(core, "paused")["absorbed"] is True
    call(core, "resume", owner="trainer")
    streams.run()


def test_a_trial_changes_nothing(core: EngineCore) -> None:
    streams = started(core)
    reply = answered(ask(core, "pause", mode="in_place", is_trial=True))["ok"]
    assert (reply["paused"], call(core, "paused")["is_paused"]) == (False, False)
    streams.run()


def test_a_continue_that_overtakes_what_needs_the_pause_stops_that(
    core: EngineCore,
) -> None:
    streams = started(core)
    seen: list[int] = []
    core.model_executor._tests_note = lambda *_: seen.append(1)
    answered(ask(core, "pause", mode="in_place"))
    answer = worker_call(core)
    assert isinstance(answer, Future) and not answer.done()
    call(core, "resume")
    assert "decoding went on" in str(answer.exception(timeout=0))
    assert not seen
    assert count(streams.run()) == 120
    del core.model_executor._tests_note


def test_a_second_call_waits_with_the_first_until_no_step_is_in_flight(
    core: EngineCore,
) -> None:
    streams = started(core)
    seen: list[int] = []
    core.model_executor._tests_note = lambda *_: seen.append(len(core.batch_queue))
    answered(ask(core, "pause", mode="in_place"))
    answers = [worker_call(core), worker_call(core)]
    for answer in answers:
        settled(streams, answer)
    assert seen == [0, 0]
    del core.model_executor._tests_note


def test_a_pause_takes_force_when_no_update_comes(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorption, "PATIENCE_S", 0.3)
    before = enforced(core).get(Need.NO_UPDATE, 0)
    streams = started(core)
    call(core, "start", transport="local")
    answered(ask(core, "pause", mode="in_place"))
    core.vllm_inflight.pauses.absorption._timer.join()
    streams.step(3)
    assert call(core, "paused")["absorbed"] is True, "an update is under way"
    call(core, "abort")
    until(lambda: streams.step() and not call(core, "paused")["absorbed"])
    assert is_frozen(core, streams)
    assert enforced(core)[Need.NO_UPDATE] == before + 1


def test_an_update_that_waited_for_a_long_step_comes_before_the_force(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued calls of threads come first, and so does the end of the patience."""
    monkeypatch.setattr(absorption, "PATIENCE_S", 0.1)
    streams = started(core)
    answered(ask(core, "pause", mode="in_place"))
    core.vllm_inflight.pauses.absorption._timer.join()
    core.vllm_inflight.step_queue.drain()
    call(core, "start", transport="local")
    core.vllm_inflight.pauses.absorption._timer.join()
    streams.step(2)
    assert call(core, "paused")["absorbed"] is True
    call(core, "abort")
    call(core, "resume")
    streams.run()


def test_a_write_that_nothing_has_announced_stops_decoding_when_it_is_seen(
    core: EngineCore,
) -> None:
    streams = started(core)
    answered(ask(core, "pause", mode="in_place"))
    core.vllm_inflight.ranks.is_touched = lambda: True
    core.model_executor._tests_write(2)
    streams.step()
    del core.vllm_inflight.ranks.is_touched
    streams.step(3)
    assert is_frozen(core, streams)
    assert enforced(core)[Need.WRITE] >= 1


def with_session(core: EngineCore, **pause: Any) -> Streams:
    """Three requests, an absorbed pause `retract`, and a session that came after it."""
    streams = started(core)
    answered(ask(core, "pause", mode="retract", **pause))
    session = request("session", prompt(5))
    session.resumable = True
    core.add_request(*core.preprocess_add_request(session))
    return streams.step(3)


def holding_kv(core: EngineCore) -> set[str]:
    requests = core.scheduler.requests.items()
    return {name for name, request in requests if request.num_computed_tokens}


def test_a_session_stays_in_place_when_a_pause_that_retracts_takes_force(
    core: EngineCore,
) -> None:
    streams = with_session(core)
    before = core.vllm_inflight.counts.requests["retracted"]
    settled(streams, worker_call(core))
    assert call(core, "paused")["mode"] == "retract"
    assert holding_kv(core) == {"session"}
    assert core.vllm_inflight.counts.requests["retracted"] == before + 3
    assert is_frozen(core, streams)
    assert code(core.inflight("flush", {})) == "pause_conflict"
    call(core, "resume")
    streams.step(60)
    assert len(streams.tokens["session"]) == 40
    assert_told_truly(core, streams, LABELS.get)


def test_a_session_stays_in_place_at_a_commit_under_a_pause_that_retracts(
    core: EngineCore,
) -> None:
    streams = with_session(core)
    stage_weights(core, 1)
    refused = core.inflight("commit", {"mode": "retract", "weight_version": "one"})
    assert "streaming session" in refused["error"]["message"]
    reply = call(core, "commit", weight_version="one")
    assert reply["num_retracted"] == 3
    streams.step(60)
    assert_told_truly(core, streams, LABELS.get)
    made = core.model_executor.sampled
    for name, is_whole in (("r0", True), ("session", False)):
        of_new = [sample for sample in made[name] if sample.weights == 1]
        assert of_new and all(w == 1 for s in of_new for w in s.kv) is is_whole


@pytest.mark.parametrize("is_in_force", [False, True])
@pytest.mark.parametrize("prefix_cache", ["versioned", "shared"])
def test_a_commit_that_drops_no_caches_for_a_session_is_rejected_if_these_are_shared(
    make: Callable[..., EngineCore], prefix_cache: str, is_in_force: bool
) -> None:
    """Whether the pause that asked for it is absorbed, or has taken force meanwhile."""
    flags = {"pauses": "absorb", "prefix_cache": prefix_cache}
    core = make(is_async=True, inflight=flags)
    streams = with_session(core, flush_cache=True)
    if is_in_force:
        settled(streams, core.collective_rpc("nothing_known"))
        assert call(core, "paused")["absorbed"] is False
    stage_weights(core, 1)
    answer = core.inflight("commit", {"weight_version": "one"})
    if prefix_cache == "shared":
        assert "streaming session" in answer["error"]["message"]
        call(core, "abort")
    else:
        assert "blocks in use" in answer["ok"]["not_dropped"]
    call(core, "resume")
    streams.step(60)


@pytest.mark.parametrize("mode", ["in_place", None])
@pytest.mark.parametrize("prefix_cache", ["shared", "versioned"])
def test_a_commit_that_is_to_drop_caches_is_rejected_for_a_session(
    make: Callable[..., EngineCore], prefix_cache: str, mode: str | None
) -> None:
    core = make(
        is_async=True, inflight={"pauses": "absorb", "prefix_cache": prefix_cache}
    )
    with_session(core)
    stage_weights(core, 1)
    held = holding_kv(core)
    body = {"weight_version": "one", "flush_cache": True, "mode": mode}
    assert code(core.inflight("commit", body)) == "pause_conflict"
    assert holding_kv(core) == held


def test_an_absorbed_pause_does_not_hold_up_a_commit_that_waits(
    core: EngineCore,
) -> None:
    streams = started(core)
    stage_weights(core, 1)
    answered(ask(core, "pause", mode="in_place"))
    commit = core.inflight("commit", {"mode": "wait", "weight_version": "one"})
    add(core, "late", prompt(9))
    settled_reply = settled(streams, commit)["ok"]
    assert settled_reply["weight_version"] == "one"
    assert call(core, "paused")["absorbed"] is True
    streams.run()
    assert set(streams.stamps["late"]) == {"one"}


def test_status_health_and_metrics_say_that_the_pause_is_absorbed(
    core: EngineCore,
) -> None:
    streams = started(core)
    assert call(core, "health")["pause_detail"] is None
    absorbed = call(core, "metrics")["pauses_absorbed"]
    answered(ask(core, "pause", mode="in_place"))
    for method in ("health", "status"):
        assert "is absorbed" in call(core, method)["pause_detail"]
    metrics = call(core, "metrics")
    assert (metrics["paused"], metrics["pause_absorbed"]) == (False, True)
    assert metrics["pauses_absorbed"] == absorbed + 1
    settled(streams, worker_call(core))
    metrics = call(core, "metrics")
    assert (metrics["paused"], metrics["pause_absorbed"]) == (True, False)
    assert metrics["pauses_enforced"]["worker_call"] >= 1
    assert call(core, "health")["pause_detail"] is None
