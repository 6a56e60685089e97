"""Sleep on a GPU: memory is given back, and what comes after equals a fresh engine."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engines.adapters import make_adapter
from tests.support.engines.bare_core import call
from tests.support.engines.probe import greedy, prompts
from tests.support.engines.script import run_script
from tests.support.gpu.memory import taken
from vllm.inflight.errors import EngineAsleep, OutOfDeviceMemory
from vllm.inflight.worker.memory.placement import placement_of
from vllm.inflight.worker.worker_state import WorkerState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 2048, "layers": 4, "vocab": 32000}
MIB = 1 << 20
KV_BYTES = 4096 * MIB
"""Much more than what else comes and goes."""
LONG = SamplingParams(temperature=0, max_tokens=900)
ROUNDS = 5


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def eager(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def long_texts(llm: Any) -> list[list[int]]:
    """To the end of the text, or of the context."""
    outputs = llm.generate(prompts(4), LONG, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def both(start: Callable[..., Any], new: Path, eager: bool) -> Any:
    """What a fresh engine on the new weights says, shortly and at length."""
    llm = start(new, enforce_eager=eager)
    return greedy(llm), long_texts(llm)


@pytest.fixture(scope="module")
def fresh(both: Any) -> list[list[int]]:
    return both[0]


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], both: Any, old: Path, eager: bool) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start(
        old,
        enforce_eager=eager,
        enable_sleep_mode=True,
        kv_cache_memory_bytes=KV_BYTES,
        weight_transfer_config=WeightTransferConfig(backend="local"),
    )


@pytest.fixture
def llm(engine: Any, old: Path) -> Iterator[Any]:
    """The engine, awake, on the old weights, with no update under way."""
    engine.update_weights_from_disk(str(old), "old")
    yield engine
    engine.wake_up()
    if engine.weight_update_status()["active"] is not None:
        engine.abort_weight_update()


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def arena_of(llm: Any) -> Any:
    worker = llm.llm_engine.model_executor.driver_worker
    return placement_of(worker.get_model()).arena


def one_set(llm: Any) -> int:
    """Bytes of the memory of one set of weights."""
    return sum(num_bytes for _, num_bytes in arena_of(llm).runs())


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_gpu_memory_and_a_wake_up_takes_it_again(
    llm: Any, old: Path, level: int
) -> None:
    arena, awake, weights = arena_of(llm), taken(), one_set(llm)
    assert arena.stats()["backed_bytes"] == 2 * weights > 500 * MIB
    llm.sleep(level=level)
    asleep = taken()
    assert arena.stats()["backed_bytes"] == 0
    assert awake - asleep > 2 * weights + 1024 * MIB  # the KV cache is much larger
    llm.wake_up(tags=["weights"])
    half = taken()
    assert abs(half - asleep - 2 * weights) < 512 * MIB
    assert awake - half > 1024 * MIB
    if level == 2:
        llm.update_weights_from_disk(str(old), "old again")
    llm.wake_up(tags=["kv_cache"])
    assert abs(taken() - awake) < 512 * MIB


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_a_scrub_that_a_sleep_has_met_reads_no_memory_that_is_given_back(
    llm: Any, tags: list[str] | None
) -> None:
    """It was begun before, and reads another slice at every moment of the sleep."""
    stager = WorkerState.of(
        llm.llm_engine.model_executor.driver_worker.worker
    ).require_stager()
    assert stager.scrub("begin") > 0
    stager.scrub("slice")
    llm.sleep(level=1)
    stager.scrub("slice")
    torch.cuda.synchronize()
    llm.wake_up(tags=tags)
    stager.scrub("slice")
    torch.cuda.synchronize()
    assert llm.verify_weights()["result"] == "equal"
    llm.wake_up()
    assert llm.verify_weights()["result"] == "equal"


def test_level_1_changes_no_token_and_the_next_update_works(
    llm: Any, new: Path, fresh: list[list[int]]
) -> None:
    before = greedy(llm)
    for _ in range(2):
        llm.sleep(level=1)
        llm.wake_up()
        assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == before


def test_a_sleep_succeeds_while_another_process_takes_memory(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, look = greedy(llm), torch.accelerator.get_memory_info
    taken_elsewhere = count(step=2 * KV_BYTES)

    def less_each_time(*args: Any) -> tuple[int, int]:
        free, total = look(*args)
        return free - next(taken_elsewhere), total

    monkeypatch.setattr(torch.accelerator, "get_memory_info", less_each_time)
    llm.sleep(level=1)
    assert next(taken_elsewhere) > 2 * KV_BYTES, "upstream has not looked twice"
    monkeypatch.undo()
    llm.wake_up()
    assert greedy(llm) == before


def test_rounds_of_a_hybrid_engine_equal_a_fresh_one(
    llm: Any, old: Path, new: Path, both: Any
) -> None:
    short, long = greedy(llm), long_texts(llm)
    versions = [(new, *both), (old, short, long)]
    for number in range(ROUNDS):
        path, said, told = versions[number % 2]
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        assert llm.weight_info()["weights"] == "gone"
        llm.update_weights_from_disk(str(path), f"round-{number}")
        llm.wake_up(tags=["kv_cache"])
        assert greedy(llm) == said
        texts = long_texts(llm)
        assert texts == told
        assert all(any(text) for text in texts), "all ids are zero"
        assert llm.get_weight_version() == f"round-{number}"
        assert llm.weight_info()["weights"] == "live"


def test_an_update_in_flight_after_a_sleep_can_be_rolled_back(
    llm: Any, old: Path, new: Path, fresh: list[list[int]]
) -> None:
    before = greedy(llm)
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights_from_disk(str(old), "old")
    with pytest.raises(Exception, match="not kept"):
        llm.rollback_weights()
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_calls_that_need_weights_are_rejected_while_weights_are_asleep(
    llm: Any, old: Path, new: Path, level: int
) -> None:
    before = greedy(llm)
    llm.update_weights_from_disk(str(old), "old")
    llm.sleep(level=level)
    with pytest.raises(EngineAsleep):
        llm.update_weights_from_disk(str(new), "new")
    with pytest.raises(EngineAsleep):
        llm.rollback_weights()
    with pytest.raises(EngineAsleep):
        llm.collective_rpc("compute_weight_checksums")
    reads = {"checksums": {}, "rows": {"tensor": "model.norm.weight"}}
    for read, body in reads.items():
        answer = core_of(llm).inflight(read, body)
        assert answer["error"]["code"] == "engine_asleep"
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.update_weights_from_disk(str(old), "old")
    llm.wake_up(tags=["kv_cache"])
    assert greedy(llm) == before


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_sleep_ends_an_update_that_is_staged(
    llm: Any, new: Path, fresh: list[list[int]], is_sealed: bool
) -> None:
    before = greedy(llm)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(new)}})
    if is_sealed:
        call(core_of(llm), "prepare")
    llm.sleep(level=1)
    llm.wake_up()
    with pytest.raises(EngineAsleep):
        llm.finish_weight_update(weight_version="new")
    assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh


def test_the_kv_cache_can_sleep_alone(
    llm: Any, new: Path, fresh: list[list[int]]
) -> None:
    awake = taken()
    # In this process nothing steps by itself, and a step takes leave of what has ended.
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:
        llm.llm_engine.step()
    llm.sleep(level=0)
    llm.llm_engine.release_kv_cache_memory()
    assert awake - taken() > 1024 * MIB
    llm.update_weights_from_disk(str(new), "new")
    llm.wake_up(tags=["kv_cache"])
    assert greedy(llm) == fresh


def test_upstreams_reload_ends_a_sleep_of_level_2(llm: Any) -> None:
    before = greedy(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    assert greedy(llm) == before


def test_the_live_weights_serve_without_memory_for_the_shadow_weights(
    llm: Any, new: Path, fresh: list[list[int]]
) -> None:
    weights = one_set(llm)
    llm.sleep(level=1)
    torch.cuda.empty_cache()
    num_bytes = torch.cuda.mem_get_info()[0] - weights * 3 // 2
    hog = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    llm.wake_up(tags=["weights"])
    with pytest.raises(OutOfDeviceMemory, match="GiB"):
        llm.update_weights_from_disk(str(new), "new")
    del hog
    torch.cuda.empty_cache()
    llm.update_weights_from_disk(str(new), "new")
    llm.wake_up(tags=["kv_cache"])
    assert greedy(llm) == fresh


@pytest.mark.parametrize("staging", ["host", "delta"])
def test_an_engine_with_weights_in_upstreams_pools_sleeps_with_upstreams_allocator(
    llm: Any, fresh: list[list[int]], old: Path, new: Path, eager: bool, staging: str
) -> None:
    before = greedy(llm)
    llm.sleep(level=1)  # leaves the GPU to the other process
    seen = run_script("asleep_on_host", old, new, int(eager), staging)
    assert seen == {"before": before, "level_1": before, "level_2": fresh}


@pytest.mark.parametrize("staging", ["host", "delta"])
def test_an_adapter_beside_weights_in_upstreams_pools_outlives_every_sleep(
    llm: Any, old: Path, eager: bool, staging: str, tmp_path: Path
) -> None:
    make_adapter(old, tmp_path)
    without = greedy(llm)
    llm.sleep(level=1)
    seen = run_script("asleep_on_host", old, old, int(eager), staging, tmp_path)
    assert seen["before"] == seen["level_1"] == seen["level_2"] != without
