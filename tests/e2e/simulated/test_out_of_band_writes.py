"""An out-of-band write with two steps in flight: stamps and KV are right.

The simulated worker knows which weights wrote each slot of the KV cache.
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.e2e.simulated.test_connectors import Saving
from tests.e2e.simulated.test_sessions import TEXT, Told, say
from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import (
    assert_told_truly,
    publish_weights,
    stage_weights,
)
from tests.support.simulated.graph import Queued
from vllm.inflight.engine.scheduling import encoder_cache, kv_connectors


def label_of(core: EngineCore, wrote: dict[int, str]) -> Any:
    return lambda weights: wrote.get(weights, "default")


def test_stamps_and_kv_versions_are_correct_across_out_of_band_writes(
    core: EngineCore,
) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams, wrote = Streams(core).step(7), {}
    for weights in (1, 2):
        core.collective_rpc("tests_write", args=(weights,))
        wrote[weights] = call(core, "info")["weight_version"]
        add(core, f"comes {weights}", prompt(1), max_tokens=20)
        streams.step(9)
    streams.run()
    assert_told_truly(core, streams, label_of(core, wrote))
    for weights in (1, 2):
        made = core.model_executor.sampled[f"comes {weights}"]
        # The same prompt was in the cache, of other weights.
        assert all(w == weights for s in made if s.weights == weights for w in s.kv)
    runs = {s.weights for s in core.model_executor.sampled["runs"]}
    assert runs == {0, 1, 2}


def test_a_write_aborts_only_requests_that_cannot_be_computed_again(
    make: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connector would save their KV of the weights before."""
    core = make(Queued, pipeline_parallel_size=2)
    saving = Saving(core)
    monkeypatch.setattr(kv_connectors, "_apart", lambda scheduler: [saving])
    streams = Told(core)
    say(core, list(TEXT))
    add(core, "runs", prompt(1), max_tokens=60)
    while len(streams.tokens.get("runs", ())) < 9:
        streams.step()
    core.collective_rpc("tests_write", args=(1,))
    label = call(core, "info")["weight_version"]
    streams.run()
    assert streams.finished == {"s": "abort", "runs": "length"}
    assert "tests_write has written" in streams.stopped["s"]
    assert "in a streaming session" in streams.stopped["s"]
    assert_told_truly(core, streams, label_of(core, {1: label}))
    assert {w for w in core.model_executor.sampled["runs"][-1].kv} == {1}
    assert saving.num_to_come == [0]


def test_an_out_of_band_write_removes_the_rollback_target(core: EngineCore) -> None:
    publish_weights(core, 1, "one")
    core.collective_rpc("tests_write", args=(5,))
    answer = core.inflight("rollback", {})
    assert answer["error"]["code"] == "nothing_to_roll_back"


def test_a_call_that_fails_during_its_write_holds_all_requests(
    core: EngineCore,
) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(7)
    with pytest.raises(RuntimeError, match="of a test"):
        core.collective_rpc("tests_write", args=(1, "of a test"))
    streams.step(3)  # what was in flight comes out
    num_made = len(streams.tokens["runs"])
    add(core, "comes", prompt(2))
    streams.step(20)
    assert len(streams.tokens["runs"]) == num_made and "comes" not in streams.tokens
    publish_weights(core, 2, "two")
    streams.run()
    labels = {0: "default", 2: "two"}
    assert_told_truly(core, streams, labels.__getitem__)


def test_a_reload_in_several_calls_holds_every_request(core: EngineCore) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(7)
    core.collective_rpc("tests_start_load")
    streams.step(3)
    num_made = len(streams.tokens["runs"])
    add(core, "comes", prompt(2))
    streams.step(20)
    assert len(streams.tokens["runs"]) == num_made and "comes" not in streams.tokens
    core.collective_rpc("tests_finish_load", args=(1,))
    label = call(core, "info")["weight_version"]
    streams.run()
    assert_told_truly(core, streams, ["default", label].__getitem__)


def test_another_owners_pause_outlives_a_reload_in_several_calls(
    core: EngineCore,
) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(7)
    core.inflight("pause", {"mode": "in_place", "owner": "trainer"})
    streams.step(3)
    core.collective_rpc("tests_start_load")
    core.collective_rpc("tests_finish_load", args=(1,))
    num_made = len(streams.tokens["runs"])
    assert len(streams.step(10).tokens["runs"]) == num_made
    call(core, "resume", owner="trainer")
    assert len(streams.run().tokens["runs"]) == 60


def test_an_out_of_band_write_ends_a_waiting_commit(
    core: EngineCore,
) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(7)
    stage_weights(core, 1)
    commit = core.inflight("commit", {"mode": "wait"})
    core.collective_rpc("tests_write", args=(2,))
    streams.step(2)
    error = commit.result(timeout=60)["error"]
    assert error["code"] == "update_in_progress" and "tests_write" in error["message"]
    streams.run()
    label = call(core, "info")["weight_version"]
    assert_told_truly(core, streams, {0: "default", 2: label}.__getitem__)


def test_a_write_outside_of_any_call_is_detected_before_the_next_step(
    core: EngineCore,
) -> None:
    """As a thread of a worker makes one, or a call past the engine core."""
    worker = core.model_executor
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(7)
    worker._tests_write(1)
    worker.board.touch()
    streams.step(9)
    label = call(core, "info")["weight_version"]
    assert label.startswith("untracked-")
    add(core, "comes", prompt(1), max_tokens=20)
    streams.run()
    assert_told_truly(core, streams, ["default", label].__getitem__)
    assert all(set(s.kv) == {1} for s in worker.sampled["comes"])


def test_a_write_is_followed_by_all_that_it_takes_if_one_step_of_it_fails(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a connector would give KV of the weights before to every later request."""
    dropped: list[object] = []
    monkeypatch.setattr(kv_connectors, "drop", lambda *of: dropped.append(of))

    def fails(core: EngineCore) -> None:
        raise RuntimeError("of a test")

    monkeypatch.setattr(encoder_cache, "see_again", fails)
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(9)
    core.collective_rpc("tests_write", args=(1,))
    assert dropped
    label = call(core, "info")["weight_version"]
    assert_told_truly(core, streams.run(), {0: "default", 1: label}.__getitem__)


def test_a_look_that_fails_before_a_step_holds_and_does_not_end_the_engine(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = core.model_executor
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(7)
    monkeypatch.setattr(
        worker, "_inflight_overwrite", lambda *_: {"error": "of a test"}
    )
    worker.board.touch()
    streams.step(5)
    num_made = len(streams.tokens["runs"])
    assert len(streams.step(10).tokens["runs"]) == num_made
    told = call(core, "info")
    assert told["weights"] == "gone" and "of a test" in told["weights_detail"]
    monkeypatch.undo()
    publish_weights(core, 2, "two")
    assert_told_truly(core, streams.run(), {0: "default", 2: "two"}.__getitem__)


def test_updates_are_rejected_after_a_call_replaced_a_parameters_tensor(
    make: Any,
) -> None:
    core = make(num_blocks=47)
    core.model_executor.displaced = ["up.weight"]
    core.collective_rpc("tests_write", args=(1,))
    answer = core.inflight("start", {"transport": "local"})["error"]
    assert answer["code"] == "staging_unavailable"
    assert "tests_write has replaced the tensor of up.weight" in answer["message"]
    add(core, "runs", prompt(1))
    assert len(Streams(core).run().tokens["runs"]) == 40
    core.model_executor.displaced = []
    core.vllm_inflight.ranks.reason = None
