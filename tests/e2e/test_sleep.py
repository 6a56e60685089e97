"""Sleep and updates: what is refused meanwhile, what is lost, and how it goes on.

The CPU build keeps its memory when it is told to sleep, so what is seen here is
the engine's part; tests/gpu/test_sleep.py gives memory back.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt, publish, stage
from tests.support.engines.user_extension import Extension
from tests.support.waiting import until
from vllm.inflight.errors import EngineAsleep
from vllm.inflight.patch.controllers import controller_of

pytestmark = pytest.mark.engine

NEEDS_WEIGHTS = {
    "start": {"transport": "local"},
    "receive": {"update_info": {}},
    "prepare": {},
    "commit": {},
    "rollback": {},
    "undo": {},
    "checksums": {},
    "rows": {"tensor": "model.norm.weight", "num_rows": 1},
    "rename": {"weight_version": "other"},
    "resume": {},
}


@contextmanager
def may_sleep(core: EngineCore) -> Iterator[None]:
    """Context: a core may sleep, and is awake in the end."""
    core.vllm_config.model_config.enable_sleep_mode = True
    yield
    if core.model_executor.is_sleeping:
        core.wake_up()
    if call(core, "info")["weights"] == "gone":
        core.collective_rpc("reload_weights")
    core.vllm_config.model_config.enable_sleep_mode = False


@pytest.fixture
def sleeper(core: EngineCore) -> Iterator[EngineCore]:
    """A core on the old weights that may sleep."""
    with may_sleep(core):
        yield core


def refused(core: EngineCore, method: str, **body: Any) -> str:
    """The code of the error that a call is answered with."""
    answer = core.inflight(method, body)
    if isinstance(answer, Future):
        answer = answer.result(timeout=30)
    assert "ok" not in answer, answer
    return str(answer["error"]["code"])


def says(core: EngineCore, name: str) -> list[int]:
    """What the core makes of one prompt, to the end."""
    add(core, name, prompt(3))
    return Streams(core).run().tokens[name]


@pytest.mark.parametrize("method", NEEDS_WEIGHTS)
@pytest.mark.parametrize("level", [1, 2])
def test_calls_that_need_weights_are_rejected_while_the_weights_sleep(
    sleeper: EngineCore, method: str, level: int
) -> None:
    before = call(sleeper, "info")
    sleeper.sleep(level)
    assert refused(sleeper, method, **NEEDS_WEIGHTS[method]) == "engine_asleep"
    told = call(sleeper, "info")
    assert (told["weights"], told["epoch"]) == ("asleep", before["epoch"])
    assert call(sleeper, "status")["active"] is None


@pytest.mark.parametrize("method", ["compute_weight_checksums", "reload_weights"])
def test_upstreams_own_calls_of_sleeping_weights_are_rejected(
    sleeper: EngineCore, method: str
) -> None:
    sleeper.sleep(1)
    with pytest.raises(EngineAsleep):
        sleeper.collective_rpc(method)


@pytest.mark.parametrize("phase", ["staging", "staged"])
def test_an_update_under_way_ends_with_the_reason(
    sleeper: EngineCore, folders: dict[str, Path], phase: str
) -> None:
    if phase == "staged":
        stage(sleeper, folders["new"])
    else:
        call(sleeper, "start", transport="local")
    update_id = call(sleeper, "status")["active"]["update_id"]
    sleeper.sleep(1)
    told = call(sleeper, "status", update_id=update_id)
    assert (told["phase"], told["error"]["code"]) == ("aborted", "engine_asleep")
    sleeper.wake_up()
    assert refused(sleeper, "commit", update_id=update_id) == "engine_asleep"
    publish(sleeper, folders["new"], "new")


def test_a_waiting_update_call_fails_when_sleep_ends_the_update(
    sleeper: EngineCore, folders: dict[str, Path]
) -> None:
    call(sleeper, "start", transport="local")
    sleeper.inflight("receive", {"update_info": {"path": str(folders["new"])}})
    sealed = sleeper.inflight("prepare", {})
    sleeper.sleep(1)
    answer = sealed.result(timeout=30)
    # The vote may have come first; then the commit is what is refused.
    assert "ok" in answer or answer["error"]["code"] == "engine_asleep"
    assert refused(sleeper, "commit") == "engine_asleep"


def test_sleep_changes_neither_weights_nor_tokens(sleeper: EngineCore) -> None:
    before, version = says(sleeper, "before"), call(sleeper, "info")
    sleeper.sleep(1)
    assert sleeper.wake_up() is True
    after = call(sleeper, "info")
    assert says(sleeper, "after") == before
    assert after == version | {"previous": None}  # the way back is what it costs
    assert refused(sleeper, "rollback") == "nothing_to_roll_back"


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_goes_on_while_only_the_kv_cache_is_asleep(
    sleeper: EngineCore, folders: dict[str, Path], level: int
) -> None:
    publish(sleeper, folders["new"], "new")
    expected = says(sleeper, "expected")
    publish(sleeper, folders["old"], "old")
    epoch = call(sleeper, "info")["epoch"]
    for number in range(3):
        sleeper.sleep(level)
        assert sleeper.wake_up(["weights"]) is False
        add(sleeper, f"early-{number}", prompt(3))
        publish(sleeper, folders["new"], f"new-{number}")
        assert refused(sleeper, "resume") == "engine_asleep"
        assert Streams(sleeper).step(3).tokens == {}
        assert sleeper.wake_up(["kv_cache"]) is True
        early = Streams(sleeper).run()
        assert early.tokens[f"early-{number}"] == expected
        assert set(early.stamps[f"early-{number}"]) == {f"new-{number}"}
        epoch += 1
        told = call(sleeper, "info")
        assert (told["epoch"], told["weights"]) == (epoch, "live")


def test_nothing_is_decoded_after_a_level_2_sleep_until_a_whole_version_arrives(
    sleeper: EngineCore, folders: dict[str, Path]
) -> None:
    publish(sleeper, folders["new"], "new")
    expected = says(sleeper, "expected")
    sleeper.sleep(2)
    sleeper.wake_up()
    told = call(sleeper, "info")
    assert (told["weights"], told["digest"], told["previous"]) == ("gone", None, None)
    assert sleeper.is_sleeping()
    for method in ("checksums", "rows", "rename", "resume"):
        assert refused(sleeper, method, **NEEDS_WEIGHTS[method]) == "engine_asleep"
    subset = {"format": 1, "subset": ["model.norm.weight"]}
    assert refused(sleeper, "start", transport="local", manifest=subset) == (
        "engine_asleep"
    )
    norm = {"name": "model.norm.weight", "shape": [128], "dtype": "bfloat16"}
    delta = {"format": 1, "base": 32 * "0", "tensors": [norm | {"digest": 32 * "0"}]}
    assert refused(sleeper, "start", transport="local", manifest=delta) == (
        "base_mismatch"
    )
    assert refused(sleeper, "rollback") == "nothing_to_roll_back"
    add(sleeper, "waits", prompt(3))
    assert Streams(sleeper).step(3).tokens == {}
    publish(sleeper, folders["new"], "again")
    assert Streams(sleeper).run().tokens["waits"] == expected
    # What was there before is nothing to return to.
    assert refused(sleeper, "rollback") == "nothing_to_roll_back"


@pytest.fixture
def extended(sleeper: EngineCore) -> Iterator[EngineCore]:
    """A core with a user's worker extension, put where upstream puts it."""
    parallel = sleeper.vllm_config.parallel_config
    worker = type(sleeper.model_executor.driver_worker.worker)
    bases = worker.__bases__
    parallel.worker_extension_cls = "tests.support.engines.user_extension.Extension"
    if Extension not in bases:
        worker.__bases__ = (*bases, Extension)
    yield sleeper
    worker.__bases__ = bases
    parallel.worker_extension_cls = ""


def test_only_worker_calls_that_write_weights_count_as_filling_lost_weights(
    extended: EngineCore,
) -> None:
    extended.sleep(2)
    extended.wake_up(["weights"])
    for method in ("synchronize_device", "get_kv_cache_spec", lambda worker: None):
        extended.collective_rpc(method)
        assert call(extended, "info")["weights"] == "gone"
    assert extended.collective_rpc("tests_double", args=(21,)) == [42]
    assert call(extended, "info")["weights"] == "gone"


def load(worker: Any, folder: str) -> None:
    """A function of a user's, which is handed to `collective_rpc`."""
    Extension.tests_reload(worker, folder)


@pytest.mark.parametrize("way", ["reload_weights", "tests_reload", load])
def test_out_of_band_writes_that_fill_lost_weights_end_the_wait(
    extended: EngineCore, folders: dict[str, Path], way: Any
) -> None:
    before, told = says(extended, "before"), call(extended, "info")
    extended.sleep(2)
    extended.wake_up(["weights"])
    extended.collective_rpc("synchronize_device")  # fills nothing
    assert call(extended, "info")["weights"] == "gone"
    args = () if way == "reload_weights" else (str(folders["old"]),)
    extended.collective_rpc(way, args=args)
    after = call(extended, "info")
    assert (after["weights"], after["epoch"]) == ("live", told["epoch"] + 1)
    assert after["digest"] is None
    extended.wake_up(["kv_cache"])
    assert says(extended, "after") == before


def test_a_sleep_that_loses_nothing_needs_no_update(core: EngineCore) -> None:
    """Without --enable-sleep-mode upstream gives nothing back, at any level."""
    before = says(core, "before")
    core.sleep(2)
    core.wake_up()
    assert call(core, "info")["weights"] == "live"
    assert says(core, "after") == before


def test_a_wake_up_does_not_end_another_owners_pause(sleeper: EngineCore) -> None:
    add(sleeper, "waits", prompt(3))
    call(sleeper, "pause", mode="retract", owner="trainer")
    sleeper.sleep(1)
    sleeper.wake_up()
    assert call(sleeper, "paused")["mode"] == "retract"
    assert Streams(sleeper).step(3).tokens == {}
    call(sleeper, "resume", owner="trainer")


def test_a_lease_that_runs_out_does_not_wake_anything(sleeper: EngineCore) -> None:
    call(sleeper, "pause", mode="retract", lease_s=0.05)
    sleeper.sleep(1)
    add(sleeper, "waits", prompt(3))
    deadline = time.monotonic() + 30
    while not call(sleeper, "paused")["leases_expired"]:
        assert time.monotonic() < deadline
        sleeper.vllm_inflight.step_queue.run(lambda: None)
        time.sleep(0.01)
    assert call(sleeper, "paused")["is_paused"]
    assert Streams(sleeper).step(3).tokens == {}
    sleeper.wake_up()
    assert len(Streams(sleeper).run().tokens["waits"]) == 40


def test_a_sleep_is_rejected_while_a_transfer_does_not_end(
    sleeper: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.inflight.worker.staging.thread import StagingThread

    before = says(sleeper, "before")
    call(sleeper, "start", transport="local")
    monkeypatch.setattr(StagingThread, "ends_by", lambda *_: False)
    monkeypatch.setattr(StagingThread, "_is_cancelled", lambda _: False)

    def rejected() -> str:
        with pytest.raises(Exception, match=r"has not let go.* at ") as caught:
            sleeper.sleep(1)
        return str(caught.value)

    # At first the thread may be deep in the walk of a model.
    until(lambda: "StagingThread" in rejected(), "its place is not told")
    monkeypatch.undo()
    assert not sleeper.is_sleeping() and says(sleeper, "after") == before
    assert call(sleeper, "info")["weights"] == "live"


def test_a_scrub_that_a_failed_sleep_put_off_comes_when_the_sleep_has_failed(
    sleeper: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's sleep waits for requests, and memory is not given back yet."""
    controller, waits = controller_of(sleeper), Future[None]()
    scrubs = controller.scrubs
    monkeypatch.setattr(scrubs, "_is_always_due", True)
    controller.sleep.sleep(1, lambda level: waits)
    num_scrubs = scrubs.results.total()
    scrubs.committed(SimpleNamespace(num_replayed=0))
    until(lambda: scrubs._thread is None, "the scrub does not end")
    assert scrubs.results.total() == num_scrubs
    waits.set_exception(RuntimeError("a GPU is lost"))
    assert call(sleeper, "info")["weights"] == "live"
    until(lambda: scrubs.results.total() > num_scrubs, "no scrub came")


def test_kv_cached_before_a_sleep_is_not_read_after_it(
    sleeper: EngineCore,
) -> None:
    says(sleeper, "before")
    assert len(sleeper.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)
    sleeper.sleep(1)
    pool = sleeper.scheduler.kv_cache_manager.block_pool
    assert not len(pool.cached_block_hash_to_block)
