"""A trainer and an engine take turns, and unfinished requests outlive every turn.

The KV cache loses what it holds (tests/support/engines/sleeping.py): a request whose KV
was not computed again has wrong tokens. tests/gpu/test_colocated_round.py gives memory
back.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines import sleeping
from tests.support.engines.bare_core import (
    Streams,
    add,
    call,
    prompt,
    publish,
    request,
)
from tests.support.engines.core_door import Door
from vllm.inflight.engine.controller import Controller
from vllm.inflight.errors import EngineAsleep, EngineFault, PauseConflict

pytestmark = pytest.mark.engine

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
NAMES = ("r0", "r1", "r2")
TOKENS = 40
BOTH = ("weights", "kv_cache")


@pytest.fixture
def sleeper(door: Door, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """A server that may sleep, on the old weights, and is awake in the end."""
    monkeypatch.setattr(door.core.vllm_config.model_config, "enable_sleep_mode", True)
    for owner, name, value in sleeping.CHANGES:
        monkeypatch.setattr(owner, name, value)
    yield door
    door.core.wake_up()
    if call(door.core, "info")["weights"] == "gone":
        door.core.collective_rpc("reload_weights")


def begin(core: EngineCore, most: int = TOKENS) -> Streams:
    """Three requests with some of their tokens."""
    for seed, name in enumerate(NAMES):
        add(core, name, prompt(seed), max_tokens=most)
    streams = Streams(core).step(12)
    assert all(0 < len(streams.tokens[name]) < TOKENS - 10 for name in NAMES)
    return streams


def undisturbed(core: EngineCore) -> dict[str, list[int]]:
    """What the three are to say on the weights served now."""
    for seed, name in enumerate(NAMES):
        add(core, name, prompt(seed), max_tokens=TOKENS)
    tokens = Streams(core).run().tokens
    core.reset_prefix_cache()
    return tokens


def computed_again(
    core: EngineCore, before: dict[str, list[int]], names: tuple[str, ...] = NAMES
) -> dict[str, list[int]]:
    """What the weights served now make of each prompt and its tokens."""
    core.reset_prefix_cache()
    for name in names:
        told = before[name]
        whole = prompt(NAMES.index(name)) + told
        add(core, f"again-{name}", whole, max_tokens=TOKENS - len(told))
    tokens = Streams(core).run().tokens
    return {name: before[name] + tokens[f"again-{name}"] for name in names}


def copied(streams: Streams) -> dict[str, list[int]]:
    return {name: list(tokens) for name, tokens in streams.tokens.items()}


def check_went_on(
    core: EngineCore, streams: Streams, before: dict[str, list[int]], label: str
) -> None:
    """Each went on to its end as the weights of `label` go on from its tokens."""
    assert streams.tokens == computed_again(core, before)
    for name in NAMES:
        old = len(before[name])
        assert streams.stamps[name] == ["old"] * old + [label] * (TOKENS - old)


@pytest.mark.parametrize("order", [*itertools.permutations(BOTH), (None,)])
@pytest.mark.parametrize("tags", [("kv_cache",), ("weights",), BOTH, None])
def test_retracted_requests_continue_under_the_weights_that_arrived_during_sleep(
    sleeper: Door, folders: dict[str, Path], tags: Any, order: Any
) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    sleeper.post("/pause_generation", mode="retract", owner="trainer")
    told = sleeper.post(RELEASE, **({} if tags is None else {"tags": list(tags)}))
    released = sorted(tags or BOTH)
    assert (told["released"], told["mode"]) == (released, "retract")
    assert told["num_aborted"] == 0
    assert core.model_executor.sleeping_tags == set(released)
    assert streams.step(3).tokens == before
    for tag in order:
        sleeper.post(RESUME, **({} if tag is None else {"tags": [tag]}))
        is_there = "weights" not in core.model_executor.sleeping_tags
        if is_there and sleeper.label != "new":
            publish(core, folders["new"], "new")
    assert core.model_executor.sleeping_tags == set()
    # The pause is somebody's: waking up does not end it.
    assert streams.step(3).tokens == before
    sleeper.post("/continue_generation", owner="trainer")
    check_went_on(core, streams.run(), before, "new")


@pytest.mark.parametrize("tags", [["kv_cache"], list(BOTH)])
def test_a_release_that_retracts_needs_no_pause_and_ends_by_waking_up(
    sleeper: Door, folders: dict[str, Path], tags: list[str]
) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    told = sleeper.post(RELEASE, tags=tags, mode="retract")
    assert (told["num_retracted"], told["num_aborted"]) == (3, 0)
    add(core, "late", prompt(9), max_tokens=5)
    assert streams.step(3).tokens == before
    sleeper.post(RESUME, tags=["weights"])
    publish(core, folders["new"], "new")
    assert streams.step(3).tokens == before
    sleeper.post(RESUME, tags=["kv_cache"])
    assert len(streams.run().tokens.pop("late")) == 5
    check_went_on(core, streams, before, "new")


def test_requests_stay_in_place_with_their_kv_while_the_weights_are_away(
    sleeper: Door,
) -> None:
    core = sleeper.core
    expected = undisturbed(core)
    streams = begin(core)
    told = sleeper.post(RELEASE, tags=["weights"], mode="in_place")
    assert told["num_retracted"] == 0 == told["num_aborted"]
    frozen = copied(streams)
    assert streams.step(3).tokens == frozen
    assert core.scheduler.get_request_counts() == (3, 0)
    sleeper.post(RESUME, tags=["weights"])
    assert streams.run().tokens == expected


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("tags", [["kv_cache"], None])
def test_a_release_is_rejected_while_requests_stay_in_place(
    sleeper: Door, folders: dict[str, Path], tags: Any, is_paused: bool
) -> None:
    core = sleeper.core
    expected = undisturbed(core)
    publish(core, folders["old"], "old")
    streams = begin(core)
    update_id = call(core, "start", transport="local")["update_id"]
    asked: dict[str, Any] = {} if tags is None else {"tags": tags}
    if is_paused:
        sleeper.post("/pause_generation", mode="in_place")
    else:
        asked["mode"] = "in_place"
    status, message = sleeper.refused(RELEASE, **asked)
    assert (status, "use mode 'retract'" in message) == (409, True)
    # Nothing is lost: no memory, no update, no rollback target, no pause.
    assert core.model_executor.sleeping_tags == set()
    assert call(core, "status")["active"]["update_id"] == update_id
    call(core, "abort")
    assert sleeper.get("/is_paused")["is_paused"] is is_paused
    sleeper.post("/continue_generation")
    assert streams.run().tokens == expected


def test_a_release_may_retract_what_a_pause_holds_in_place(sleeper: Door) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    sleeper.post("/pause_generation", mode="in_place")
    assert sleeper.post(RELEASE, mode="retract")["num_retracted"] == 3
    assert sleeper.get("/is_paused")["mode"] == "retract"
    sleeper.post(RESUME)
    assert streams.step(3).tokens == before
    sleeper.post("/continue_generation")
    check_went_on(core, streams.run(), before, "old")


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], None])
def test_a_release_without_a_mode_or_a_pause_aborts_the_requests(
    sleeper: Door, tags: Any
) -> None:
    streams = begin(sleeper.core)
    told = sleeper.post(RELEASE, **({} if tags is None else {"tags": tags}))
    assert (told["mode"], told["num_aborted"]) == ("abort", 3)
    assert not sleeper.core.scheduler.has_unfinished_requests()
    streams.step()
    sleeper.post(RESUME)
    add(sleeper.core, "after", prompt(6), max_tokens=4)
    assert len(streams.run().tokens["after"]) == 4


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("is_paused", [True, False])
def test_upstreams_sleep_that_keeps_retracts(
    sleeper: Door, folders: dict[str, Path], level: int, is_paused: bool
) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    if is_paused:
        sleeper.post("/pause_generation", mode="in_place")
    core.sleep(level, mode="keep")
    assert sleeper.get("/is_paused")["mode"] == ("retract" if is_paused else "in_place")
    core.wake_up(["weights"])
    publish(core, folders["new"], "new")
    core.wake_up(["kv_cache"])
    if is_paused:
        assert streams.step(3).tokens == before
        sleeper.post("/continue_generation")
    check_went_on(core, streams.run(), before, "new")


def test_a_sleep_that_fails_leaves_requests_and_their_pause_in_place(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineFault("the host lacks memory")

    core = sleeper.core
    expected = undisturbed(core)
    streams = begin(core)
    sleeper.post("/pause_generation", mode="in_place")
    monkeypatch.setattr(type(Controller.of(core).ranks), "prepare_sleep", fail)
    with pytest.raises(EngineFault, match="lacks memory"):
        core.sleep(1, mode="keep")
    monkeypatch.undo()
    assert sleeper.get("/is_paused")["mode"] == "in_place"
    sleeper.post("/continue_generation")
    assert streams.run().tokens == expected


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_a_sleep_is_rejected_before_any_loss_if_a_request_cannot_be_retracted(
    sleeper: Door, mode: str
) -> None:
    core = sleeper.core
    expected = undisturbed(core)
    streams = begin(core)
    session = request(f"session-{mode}", prompt(5), max_tokens=4)
    session.resumable = True
    core.add_request(*core.preprocess_add_request(session))
    streams.step(2)  # it has KV, and no tokens to compute that from again
    update_id = call(core, "start", transport="local")["update_id"]
    with pytest.raises((PauseConflict, AssertionError), match="streaming session"):
        if mode == "keep":
            core.sleep(1, mode="keep")
        else:
            sleeper.post(RELEASE, mode="retract")
    assert core.model_executor.sleeping_tags == set()
    assert call(core, "status")["active"]["update_id"] == update_id
    call(core, "abort")
    core.abort_requests([session.request_id])
    streams.run().tokens.pop(session.request_id, None)
    assert streams.tokens == expected


@pytest.mark.parametrize("is_asleep_by", ["pause", "sleep"])
def test_upstreams_release_of_the_kv_cache_keeps_requests(
    sleeper: Door, is_asleep_by: str
) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    if is_asleep_by == "pause":
        sleeper.post("/pause_generation", mode="retract")
    else:
        core.sleep(level=0, mode="keep")
    core.release_kv_cache_memory()
    assert core.model_executor.sleeping_tags == {"kv_cache"}
    core.wake_up(["kv_cache"])
    sleeper.post("/continue_generation")
    check_went_on(core, streams.run(), before, "old")


def test_upstreams_release_of_the_kv_cache_is_rejected_under_requests_in_place(
    sleeper: Door,
) -> None:
    core = sleeper.core
    expected = undisturbed(core)
    streams = begin(core)
    sleeper.post("/pause_generation", mode="in_place")
    with pytest.raises(PauseConflict, match="use mode 'retract'"):
        core.release_kv_cache_memory()
    sleeper.post("/continue_generation")
    assert streams.run().tokens == expected


def test_a_rollback_works_after_a_sleep_of_the_kv_cache_but_not_of_the_weights(
    sleeper: Door, folders: dict[str, Path]
) -> None:
    core = sleeper.core
    publish(core, folders["new"], "new")
    streams = begin(core)
    before = copied(streams)
    sleeper.post(RELEASE, tags=["kv_cache"], mode="retract")
    call(core, "rollback")
    sleeper.post(RESUME)
    assert streams.run().tokens == computed_again(core, before)
    assert {streams.stamps[name][-1] for name in NAMES} == {"old"}
    publish(core, folders["new"], "new")
    sleeper.post(RELEASE, tags=["weights"])
    sleeper.post(RESUME)
    answer = core.inflight("rollback", {})
    assert answer["error"]["code"] == "nothing_to_roll_back"


def test_an_update_under_way_ends_with_the_weights_and_not_with_the_kv_cache(
    sleeper: Door, folders: dict[str, Path]
) -> None:
    core = sleeper.core
    call(core, "start", transport="local")
    call(core, "receive", update_info={"path": str(folders["new"])})
    sleeper.post(RELEASE, tags=["kv_cache"], mode="retract")
    call(core, "prepare")
    call(core, "commit", weight_version="new")
    update_id = call(core, "start", transport="local")["update_id"]
    sleeper.post(RELEASE, tags=["weights"], mode="retract")
    told = call(core, "status", update_id=update_id)
    assert (told["phase"], told["error"]["code"]) == ("aborted", "engine_asleep")
    sleeper.post(RESUME, tags=list(BOTH))
    assert core.model_executor.sleeping_tags == set()


def test_a_single_request_can_be_aborted_while_weights_and_kv_cache_sleep(
    sleeper: Door, folders: dict[str, Path]
) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    sleeper.post(RELEASE, mode="retract")
    assert sleeper.post("/abort_request", rid="r1")["num_aborted"] == 1
    assert streams.step(2).tokens == before
    sleeper.post(RESUME, tags=["weights"])
    publish(core, folders["new"], "new")
    sleeper.post(RESUME, tags=["kv_cache"])
    assert streams.run().tokens.pop("r1") == before["r1"]
    others = ("r0", "r2")
    assert streams.tokens == computed_again(core, before, others)


def test_a_lease_that_runs_out_does_not_have_the_engine_go_on_without_memory(
    sleeper: Door, folders: dict[str, Path]
) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    sleeper.post("/pause_generation", mode="retract", lease_s=0.05)
    sleeper.post(RELEASE)
    deadline = time.monotonic() + 30
    while not call(core, "paused")["leases_expired"]:
        assert time.monotonic() < deadline
        Controller.of(core).step_queue.run(lambda: None)
        time.sleep(0.01)
    assert streams.step(3).tokens == before
    sleeper.post(RESUME, tags=["weights"])
    publish(core, folders["new"], "new")
    assert streams.step(3).tokens == before
    sleeper.post(RESUME, tags=["kv_cache"])  # nobody's pause is left: it goes on
    check_went_on(core, streams.run(), before, "new")


def test_weights_and_kv_cache_can_be_released_one_by_one_and_repeatedly(
    sleeper: Door,
) -> None:
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    for tag, others in (("weights", []), ("kv_cache", ["weights"])):
        told = sleeper.post(RELEASE, tags=[tag], mode="retract")
        assert told["released"] == [tag]
        assert core.model_executor.sleeping_tags == {tag, *others}
    # Nothing is left to give back, so no request is touched either.
    told = sleeper.post(RELEASE)
    assert (told["released"], told["num_aborted"]) == ([], 0)
    with pytest.raises(AssertionError, match="engine_asleep"):
        call(core, "resume")
    sleeper.post(RESUME)
    check_went_on(core, streams.run(), before, "old")


def test_weights_that_upstream_puts_to_sleep_go_with_the_kv_cache(
    sleeper: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleeping.Sleep, "gives_weights_alone", False)
    core = sleeper.core
    streams = begin(core)
    before = copied(streams)
    asked = {"tags": ["weights"]}
    _, message = sleeper.refused(RELEASE, **asked, mode="in_place")
    assert "only together with the KV cache" in message
    told = sleeper.post(RELEASE, **asked, mode="retract")
    assert told["released"] == ["kv_cache", "weights"]
    sleeper.post(RESUME)
    check_went_on(core, streams.run(), before, "old")


def test_a_release_with_an_unknown_option_is_rejected(sleeper: Door) -> None:
    for asked in ({"tags": ["cuda_graph"]}, {"tags": []}, {"mode": "wait"}):
        assert sleeper.refused(RELEASE, **asked)[0] == 400
    assert sleeper.core.model_executor.sleeping_tags == set()


def test_a_worker_call_that_reads_weights_is_rejected_while_they_are_away(
    sleeper: Door,
) -> None:
    sleeper.core.collective_rpc("compute_weight_checksums")
    sleeper.post(RELEASE, tags=["weights"])
    with pytest.raises(EngineAsleep):
        sleeper.core.collective_rpc("compute_weight_checksums")
