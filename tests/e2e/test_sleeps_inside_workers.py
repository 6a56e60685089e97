"""Sleeps inside workers: an extension gives memory back, and the core is not asked.

SkyRL asks the allocator of upstream's pools, and ROLL puts its worker to sleep. The
engine of these tests runs that allocator on host memory, which overwrites what sleeps.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import device_allocator
from vllm.device_allocator import cumem
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from tests.e2e.test_out_of_band_writes import rpc, says_at_last
from tests.e2e.test_sleep import refused, says
from tests.support.engines.bare_core import (
    Streams,
    add,
    call,
    prompt,
    publish,
    request,
    stage,
)
from tests.support.engines.pools_on_host import Pools
from tests.support.engines.script import OPTIONS, run_script
from tests.support.engines.unpacked import unpacked
from tests.support.waiting import until
from vllm.inflight.errors import EngineAsleep
from vllm.inflight.patch.controllers import controller_of
from vllm.inflight.patch.records.record import MARK
from vllm.inflight.worker.worker_state import WorkerState

pytestmark = pytest.mark.engine

NOTICED = "gave memory back on the workers"
EXTENSION = "tests.support.engines.sleeping_extension.SleepingExtension"


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with pytest.MonkeyPatch.context() as patch:
        yield Pools(patch)


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path], pools: Pools) -> Iterator[EngineCore]:
    """An engine core that was started with sleep mode and has the stand-in."""
    options = OPTIONS | {"max_num_seqs": 4, "dtype": "float32"}
    with unpacked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_sleep_mode_available", lambda _: True)
        config = EngineArgs(
            str(folders["old"]),
            worker_extension_cls=EXTENSION,
            enable_sleep_mode=True,
            **options,
        ).create_engine_config()
        # With our patches, which are in place now.
        for method in {"sleep", "wake_up", "discard"} & vars(Worker).keys():
            assert hasattr(getattr(Worker, method), MARK)
            patch.setattr(CPUWorker, method, getattr(Worker, method))
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
        pools.hold(core.model_executor.driver_worker.worker)
        yield core
        core.shutdown()


def keep_buffers(worker: Any) -> None:
    worker._keep_buffers()


@pytest.fixture(autouse=True)
def awake(core: EngineCore, folders: dict[str, Path]) -> Iterator[None]:
    """The core is awake, and has weights, in the end."""
    rpc(core, keep_buffers)
    yield
    rpc(core, "tests_wake_pools")
    if call(core, "info")["weights"] == "gone":
        publish(core, folders["old"], "again")


def told_of(core: EngineCore) -> tuple[str, str, bool]:
    told = call(core, "info")
    return told["weights"], told["weight_version"], told["digest"] is not None


def test_weights_that_the_pools_gave_up_are_asleep_and_then_lost(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    publish(core, folders["old"], "old")
    add(core, "waits", prompt(3))
    streams = Streams(core).step(2)
    rpc(core, "tests_sleep_pools", "kv_cache")
    assert told_of(core) == ("asleep", "old", False)
    assert core.model_executor.is_sleeping
    sampled = len(streams.tokens["waits"])
    assert len(streams.step(2).tokens["waits"]) == sampled
    assert refused(core, "start", transport="local") == "engine_asleep"
    assert refused(core, "resume") == "engine_asleep"
    assert refused(core, "rollback") == "engine_asleep"
    rpc(core, "tests_wake_pools", ["weights"])
    assert told_of(core) == ("gone", "old", False)
    assert "tests_sleep_pools" in call(core, "info")["weights_detail"]
    publish(core, folders["new"], "new again")
    # The KV sleeps still.
    assert len(streams.step(2).tokens["waits"]) == sampled
    rpc(core, "tests_wake_pools", ["kv_cache"])
    assert len(streams.run().tokens["waits"]) == len(expected)
    assert says(core, "after") == expected
    assert told_of(core) == ("live", "new again", True)


@pytest.mark.parametrize("way", ["pools", "worker"])
def test_weights_that_are_kept_come_back_with_their_version(
    core: EngineCore, folders: dict[str, Path], way: str
) -> None:
    publish(core, folders["new"], "new")
    expected, before = says(core, "expected"), call(core, "info")
    add(core, "waits", prompt(3))
    streams = Streams(core).step(2)
    rpc(core, f"tests_sleep_{way}", *(["weights"] if way == "pools" else [1]))
    assert told_of(core) == ("asleep", "new", True)
    rpc(core, f"tests_wake_{way}")
    assert call(core, "info") == before | {"previous": None}
    # Its KV is lost, and is computed again.
    assert streams.run().tokens["waits"] == expected
    assert says(core, "after") == expected
    publish(core, folders["old"], "old")


def test_a_worker_that_gives_its_weights_up_waits_for_an_update(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    rpc(core, "tests_sleep_worker", 2)
    assert told_of(core) == ("asleep", "new", False)
    rpc(core, "tests_wake_worker")
    assert told_of(core) == ("gone", "new", False)
    add(core, "waits", prompt(3))
    assert Streams(core).step(2).tokens == {}
    publish(core, folders["new"], "again")
    assert Streams(core).run().tokens["waits"] == expected


@pytest.mark.parametrize("is_whole", [True, False])
def test_weights_lost_and_loaded_in_one_call_are_live_if_they_are_complete(
    core: EngineCore, folders: dict[str, Path], is_whole: bool
) -> None:
    publish(core, folders["new"], "new")
    expected, epoch = says(core, "expected"), call(core, "info")["epoch"]
    names = None if is_whole else ["model.norm.weight"]
    rpc(core, "tests_sleep_and_fill", str(folders["new"]), names)
    told = call(core, "info")
    assert told["digest"] is None
    if not is_whole:
        assert (told["weights"], told["epoch"]) == ("gone", epoch)
        assert "1 of 19 parameters" in told["weights_detail"]
        return
    assert told["weight_version"] == f"untracked-{epoch + 1}"
    assert says(core, "after") == expected


def test_weights_that_were_written_before_they_slept_are_another_version(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    publish(core, folders["old"], "old")
    label = f"untracked-{call(core, 'info')['epoch'] + 1}"
    rpc(core, "tests_fill_and_sleep", str(folders["new"]))
    assert told_of(core) == ("asleep", label, False)
    rpc(core, "tests_wake_pools")
    assert told_of(core) == ("live", label, False)
    assert says(core, "after") == expected


def test_a_sleep_beside_the_engine_is_found_before_the_next_step(
    core: EngineCore, pools: Pools, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    pools.allocator().sleep(("kv_cache",))
    add(core, "waits", prompt(3))
    assert Streams(core).step(1).tokens == {}
    assert told_of(core) == ("asleep", "new", False)
    pools.allocator().wake_up()
    assert Streams(core).step(1).tokens == {}
    assert told_of(core) == ("gone", "new", False)
    publish(core, folders["new"], "again")
    assert says_at_last(core, "after") == expected


@pytest.mark.parametrize("kept", [(), ("kv_cache",), ("weights", "kv_cache")])
def test_a_sleep_ends_reads_before_memory_is_given_back(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...]
) -> None:
    worker: Any = core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    stager = WorkerState.of(worker).require_stager()
    allocator, done = device_allocator.get_mem_allocator_instance(), list[str]()
    release = cumem.unmap_and_release

    def note_release(handle: Any) -> None:
        done.append("given back")
        release(handle)

    monkeypatch.setattr(worker, "synchronize_device", lambda: done.append("waited"))
    monkeypatch.setattr(cumem, "unmap_and_release", note_release)
    assert stager.scrub("begin") > 0
    allocator.sleep(kept)
    assert done[0] == "waited", "slices that were enqueued may still read"
    assert "given back" in done
    assert stager.scrub("slice") is None
    with pytest.raises(EngineAsleep):  # and the core does not know of the sleep
        stager.scrub("begin")
    allocator.wake_up()
    assert stager.scrub("begin") > 0


def test_a_scrub_that_met_a_sleep_beside_the_engine_comes_after_it(
    core: EngineCore, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrubs = controller_of(core).scrubs
    monkeypatch.setattr(scrubs, "_is_always_due", True)
    num_scrubs = scrubs.results.total()
    pools.allocator().sleep(("weights",))
    scrubs.committed(SimpleNamespace(num_replayed=0))
    until(lambda: scrubs._thread is None, "the scrub does not end")
    assert scrubs.results.total() == num_scrubs
    pools.allocator().wake_up()
    rpc(core, "tests_double", 1)
    until(lambda: scrubs.results.total() > num_scrubs, "no scrub came")


def test_weights_do_not_sleep_while_an_update_is_staged(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    before = call(core, "info")
    call(core, "start", transport="local")
    with pytest.raises(Exception, match="while an update is staged"):
        rpc(core, "tests_sleep_pools", "kv_cache")
    assert call(core, "info") == before
    call(core, "receive", update_info={"path": str(folders["new"])})
    call(core, "prepare")
    assert call(core, "commit", weight_version="new")["weight_version"] == "new"


@pytest.mark.parametrize("level", [1, 2])
def test_upstreams_own_sleep_is_no_sleep_of_the_workers(
    core: EngineCore, caplog: pytest.LogCaptureFixture, level: int, folders: Any
) -> None:
    publish(core, folders["new"], "new")
    before = call(core, "info")
    core.sleep(level)
    rpc(core, "tests_double", 1)
    assert told_of(core) == ("asleep", "new", level == 1)
    core.wake_up()
    rpc(core, "tests_double", 1)
    told = call(core, "info")
    if level == 1:
        assert told == before | {"previous": None}
    else:
        assert "a sleep of level 2" in told["weights_detail"]
    assert NOTICED not in caplog.text


@pytest.mark.since("0.31.0")  # before, it is released with the weights
@pytest.mark.parametrize("has_request", [False, True])
def test_a_release_of_the_kv_cache_is_no_sleep_of_the_workers(
    core: EngineCore,
    caplog: pytest.LogCaptureFixture,
    folders: dict[str, Path],
    *,
    has_request: bool,
) -> None:
    publish(core, folders["new"], "new")
    expected, before = says(core, "expected"), call(core, "info")
    if has_request:
        add(core, "waits", prompt(3))
    streams = Streams(core).step(2)
    core.pause_scheduler(mode="keep")
    core.release_kv_cache_memory()
    rpc(core, "tests_double", 1)
    assert core.model_executor.sleeping_tags == {"kv_cache"}
    core.wake_up(["kv_cache"])
    rpc(core, "tests_double", 1)
    assert NOTICED not in caplog.text
    core.resume_scheduler()
    if has_request:
        assert streams.run().tokens["waits"] == expected
    assert says(core, "after") == expected
    assert call(core, "info") == before


def test_weights_that_the_core_gave_up_stay_lost_when_an_extension_wakes_them(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected, file = says(core, "expected"), str(folders["new"])
    core.sleep(2)
    rpc(core, "tests_wake_pools")
    assert told_of(core) == ("gone", "new", False)
    assert ": 0 of 19 parameters" in call(core, "info")["weights_detail"]
    add(core, "waits", prompt(3))
    rpc(core, "tests_load", file, ["model.norm.weight"])
    assert ": 1 of 19 parameters" in call(core, "info")["weights_detail"]
    assert Streams(core).step(2).tokens == {}
    rpc(core, "tests_load", file)
    assert call(core, "info")["weights"] == "live"
    assert Streams(core).run().tokens["waits"] == expected


def test_a_kv_cache_that_is_kept_is_read_again_and_a_lost_one_is_computed_again(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected, before = says(core, "expected"), call(core, "info")
    add(core, "waits", prompt(3))
    streams = Streams(core).step(2)
    rpc(core, "tests_sleep_pools", "weights", "kv_cache")
    assert told_of(core) == ("asleep", "new", True)
    rpc(core, "tests_wake_pools", ["weights"])
    assert told_of(core) == ("live", "new", True)
    sampled = len(streams.tokens["waits"])
    assert len(streams.step(2).tokens["waits"]) == sampled
    assert [each.request_id for each in core.scheduler.running] == ["waits"]
    rpc(core, "tests_wake_pools", ["kv_cache"])
    streams.step(2)
    rpc(core, "tests_discard_pools", "kv_cache")
    assert not core.scheduler.running
    assert refused(core, "resume") == "engine_asleep"
    rpc(core, "tests_wake_pools")
    assert streams.run().tokens["waits"] == expected
    assert call(core, "info") == before | {"previous": None}


def nap(worker: Any) -> None:
    """Sleep and wake up in one call; everything keeps its content."""
    worker.tests_sleep_pools("weights", "kv_cache")
    worker.tests_wake_pools()


@pytest.mark.parametrize("kept", [(), ("kv_cache",), ("weights", "kv_cache")])
def test_pools_that_nobody_can_fill_again_are_kept_by_every_sleep(
    core: EngineCore,
    pools: Pools,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kept: tuple[str, ...],
) -> None:
    """As upstream's own sleep keeps them."""
    tags = "runtime", "cudagraph", "scratch"
    words = torch.arange(64, dtype=torch.int32)
    others = {tag: words.clone() for tag in tags}
    monkeypatch.setattr(pools, "others", others)
    rpc(core, "tests_sleep_pools", *kept)
    assert not any(torch.equal(each, words) for each in others.values())
    rpc(core, "tests_wake_pools")
    assert [torch.equal(others[tag], words) for tag in tags] == [True, True, False]


def test_weights_that_were_lost_before_the_cores_own_sleep_are_lost(
    core: EngineCore, pools: Pools, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    pools.allocator().sleep(())
    core.sleep(1)
    core.wake_up()
    add(core, "waits", prompt(3))
    assert Streams(core).step(2).tokens == {}
    assert told_of(core) == ("gone", "new", False)
    publish(core, folders["new"], "again")
    assert Streams(core).run().tokens["waits"]


def test_weights_that_are_lost_while_a_sleep_is_acknowledged_are_lost(
    core: EngineCore,
    pools: Pools,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(core, folders["new"], "new")
    ranks, races = core.vllm_inflight.ranks, [pools.allocator().sleep]
    real = ranks.overwrite

    def overwrite(move: str, *args: Any, **more: Any) -> Any:
        if move == "acknowledge_sleep" and races:
            races.pop()(())
        return real(move, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "overwrite", overwrite)
        rpc(core, nap)
    assert not races
    pools.allocator().wake_up()
    add(core, "waits", prompt(3))
    assert Streams(core).step(2).tokens == {}
    assert told_of(core) == ("gone", "new", False)
    publish(core, folders["new"], "again")
    assert Streams(core).run().tokens["waits"]


def test_lost_kv_is_computed_again_where_a_block_is_held(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    """As by a connector that still sends it."""
    publish(core, folders["new"], "new")
    core.reset_prefix_cache()
    add(core, "first", prompt(3, 200), max_tokens=8)
    expected = Streams(core).run().tokens["first"]
    pool = core.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(1)
    try:
        rpc(core, "tests_discard_pools", "kv_cache")
        rpc(core, "tests_wake_pools")
        add(core, "again", prompt(3, 200), max_tokens=8)
        assert Streams(core).run().tokens["again"] == expected
    finally:
        pool.free_blocks(held)


def test_only_requests_that_cannot_be_computed_again_end_when_kv_is_lost(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    for name in ("session", "later session"):
        made = request(name, prompt(3))
        made.resumable = True
        core.add_request(*core.preprocess_add_request(made))
        if name == "session":
            add(core, "waits", prompt(3))
            streams = Streams(core).step(4)
    before = {name: list(tokens) for name, tokens in streams.tokens.items()}
    assert set(before) == {"session", "waits"}
    rpc(core, "tests_discard_pools", "kv_cache")
    assert streams.step().finished == {"session": "abort"}
    assert "tests_discard_pools has given back the KV" in streams.stopped["session"]
    assert "in a streaming session" in streams.stopped["session"]
    assert streams.tokens == before
    rpc(core, "tests_wake_pools")
    for _ in range(100):
        if len(streams.step().tokens.get("later session", ())) == len(expected):
            break
    assert streams.tokens["waits"] == streams.tokens["later session"] == expected
    core.abort_requests(["later session"])


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_upstreams_pause_stays_over_a_sleep_inside_the_workers(
    core: EngineCore, mode: str
) -> None:
    core.pause_scheduler(mode=mode)
    paused = core.scheduler.pause_state
    rpc(core, nap)
    assert core.scheduler.pause_state == paused
    rpc(core, "tests_sleep_pools", "weights", "kv_cache")
    rpc(core, "tests_wake_pools", ["weights"])
    rpc(core, "tests_wake_pools", ["kv_cache"])
    assert core.scheduler.pause_state == paused
    # Its resume ends it, also if that comes before the memory is back.
    rpc(core, "tests_sleep_pools", "weights", "kv_cache")
    core.resume_scheduler()
    rpc(core, "tests_wake_pools")
    assert core.scheduler.pause_state == paused.UNPAUSED
    rpc(core, "tests_sleep_pools", "weights", "kv_cache")
    rpc(core, "tests_wake_pools")
    assert core.scheduler.pause_state == paused.UNPAUSED


def test_a_sleep_and_a_wake_in_one_call_end_what_a_sleep_ends(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    stage(core, folders["old"])
    rpc(core, nap)
    assert call(core, "status")["active"] is None
    publish(core, folders["old"], "old")
    assert call(core, "info")["previous"] is not None
    rpc(core, nap)
    assert call(core, "info")["previous"] is None
    assert told_of(core) == ("live", "old", True)


@pytest.mark.since("0.31.0")  # before, workers have no backend
def test_a_sleep_that_fails_at_once_leaves_the_weights_live(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")

    def fail(*_: Any) -> None:
        raise ValueError("no parameter is to be kept")

    backend = core.model_executor.driver_worker.worker._sleep_mode_backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "suspend", fail)
        with pytest.raises(Exception, match="no parameter is to be kept"):
            rpc(core, "sleep", 2)
    assert told_of(core)[0] == "live"
    assert says(core, "after") == expected


def test_memory_of_two_ranks_is_asleep_until_both_have_it_again(
    folders: dict[str, Path],
) -> None:
    seen = run_script("sleeping_ranks", folders["new"])
    asleep = ["asleep", ["kv_cache", "weights"]]
    assert [seen[str(step)][0] for step in range(3)] == [asleep] * 3
    assert [seen[str(step)][1] for step in range(3)] == [0] * 3
    assert seen["3"] == [["live", []], 2]
    assert seen["waits"] == seen["expected"]
