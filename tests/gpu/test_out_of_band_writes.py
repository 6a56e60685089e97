"""Out-of-band writes by a user's own calls into live weights in an arena."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_out_of_band_writes import (  # noqa: F401 (tests, run here on a GPU)
    booted,
    rpc,
    test_a_call_that_breaks_off_before_it_writes_changes_nothing,
    test_a_call_that_fails_during_its_write_leaves_no_weights_to_decode_with,
    test_a_call_that_writes_nothing_changes_nothing,
    test_a_call_that_writes_nothing_leaves_an_update_under_way_alone,
    test_a_published_version_ends_the_wait_after_a_part_was_loaded,
    test_a_reload_in_several_calls_holds_decoding_until_it_has_ended,
    test_a_single_phase_of_an_update_called_by_an_extension_is_rejected,
    test_a_step_in_the_middle_of_a_reload_does_not_end_the_engine,
    test_a_subset_after_a_write_is_a_subset_of_what_was_written,
    test_a_write_ends_the_update_that_was_to_follow_on_what_was_served,
    test_an_out_of_band_write_begins_a_version,
    test_an_unfinished_reload_begun_by_the_stepping_thread_is_ended_by_the_next_step,
    test_an_unfinished_reload_is_ended_at_its_deadline,
    test_decoding_waits_while_layers_cannot_be_restored_after_a_failed_reload,
    test_no_rollback_crosses_a_call_that_wrote_weights,
    test_only_an_update_loads_into_the_shadow_weights,
    test_requests_run_on_across_a_write_and_their_tokens_say_so,
    third,
    wanted,
    writable,
)
from tests.e2e.test_sleep import says
from tests.support.engines.bare_core import Streams, add, call, prompt, publish
from tests.support.engines.probe import greedy
from tests.support.engines.user_extension import tensors_of
from vllm.inflight.worker.memory.placement import placement_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LARGE = {"hidden": 2048, "layers": 16, "vocab": 32000}
LOOK_MS = 30.0
"""More than a look at the weights of this size may take from decoding."""


def write_on_a_stream(worker: Any, name: str, scale: float) -> None:
    """As a transport does that copies beside the stream which computes."""
    param = worker.model_runner.get_model().get_parameter(name)
    stream = torch.cuda.Stream(worker.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # it is not done when the call returns
        param.data.mul_(scale)


def test_a_write_that_is_still_on_its_way_on_another_stream_is_seen(
    writable: Any,  # noqa: F811
    folders: dict[str, Path],
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    said = says(core, "before")
    rpc(core, write_on_a_stream, "model.layers.0.mlp.down_proj.weight", 0.0)
    told = call(core, "info")
    assert told["weight_version"] != "new" and told["digest"] is None
    assert says(core, "after") != said


def test_a_parameter_that_is_put_elsewhere_comes_back_into_the_arena(
    writable: Any,  # noqa: F811
    folders: dict[str, Path],
    third: Path,  # noqa: F811
) -> None:
    """Else the next update would exchange pages that nothing reads any more."""
    core = writable
    worker = core.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    publish(core, third, "third")
    expected = says(core, "expected")
    publish(core, folders["new"], "new")
    arena = placement_of(model).arena
    places = {name: param.data_ptr() for name, param in model.named_parameters()}
    rpc(core, "tests_copy", str(third), "data =")
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places
    assert all(arena.contains(param) for param in model.parameters())
    assert says(core, "after") == expected
    publish(core, folders["new"], "again")
    publish(core, third, "third again")
    assert says(core, "at last") == expected


@pytest.fixture(scope="module")
def sleeper(start: Callable[..., Any], old: Path) -> Any:
    """An engine with CUDA graphs that really gives its memory back."""
    return start(old, enforce_eager=False, enable_sleep_mode=True)


def loaded_by_hand(llm: Any, folder: Path) -> None:
    """As TRL does in the engine's process, past any call of the workers."""
    worker = llm.llm_engine.model_executor.driver_worker
    for name, tensor in tensors_of(str(folder)).items():
        worker.model_runner.model.load_weights([(name, tensor)])


@pytest.mark.parametrize("way", ["by hand", "one by one", "layer by layer"])
def test_a_trainer_in_the_engines_process_fills_weights_after_a_sleep_of_level_2(
    sleeper: Any, old: Path, new: Path, way: str
) -> None:
    llm = sleeper
    llm.update_weights_from_disk(str(new), "new")
    expected = greedy(llm)
    llm.update_weights_from_disk(str(old), "old")
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    assert "0 of" in llm.weight_info()["weights_detail"]
    if way == "by hand":
        loaded_by_hand(llm, new)
    elif way == "one by one":
        for name, tensor in tensors_of(str(new)).items():
            assert llm.weight_info()["weights"] == "gone"
            llm.collective_rpc(load_one, args=(name, tensor))
    else:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    llm.wake_up(tags=["kv_cache"])
    assert greedy(llm) == expected
    told = llm.weight_info()
    assert (told["weights"], told["digest"]) == ("live", None)


def load_one(worker: Any, name: str, tensor: torch.Tensor) -> None:
    worker.model_runner.model.load_weights([(name, tensor)])


def test_a_worker_call_does_not_read_sleeping_weights(sleeper: Any, old: Path) -> None:
    llm = sleeper
    llm.update_weights_from_disk(str(old), "old")
    said = greedy(llm)
    for level in (1, 2):
        llm.sleep(level=level)
        assert llm.collective_rpc(lambda worker: worker.rank) == [0]
        llm.wake_up()
        if level == 1:
            assert llm.weight_info()["weight_version"] == "old"
    llm.update_weights_from_disk(str(old), "old")
    assert greedy(llm) == said


def test_checking_large_weights_for_writes_takes_little_time_from_decoding(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    llm = start(checkpoint(0, **LARGE), enforce_eager=False)
    core = llm.llm_engine.engine_core.engine_core
    add(core, "runs", prompt(3), max_tokens=400)
    streams = Streams(core).step(30)
    taken = []
    for _ in range(20):
        streams.step(3)
        began = time.perf_counter()
        core.collective_rpc(lambda worker: None)
        taken.append((time.perf_counter() - began) * 1e3)
    print(f"a call that writes nothing: {sorted(taken)[10]:.2f} ms, {max(taken):.2f}")
    assert sorted(taken)[10] < LOOK_MS
    assert call(core, "info")["weight_version"] == "default"
    core.abort_requests(["runs"])
