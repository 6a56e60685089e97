"""A worker's sleep, with its weights in an arena on host memory.

Upstream's allocator is a stand-in that remembers what it was asked: it needs a GPU.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.shadow_on_host import Sets, shows, version
from tests.support.transports import lent_to
from tests.support.transports.host_memory import HostMemory
from tests.unit.transport.test_ipc import lent
from tests.unit.worker.test_arena import limit
from vllm.inflight.errors import ArenaFault, ArenaTorn, ConfigError, UpdateBusy
from vllm.inflight.worker.integrity.outside_writes import overwritten
from vllm.inflight.worker.integrity.tripwire import Tripwire
from vllm.inflight.worker.memory import placement
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model_state import ModelState
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.sleep import SleepBackend, backend_of
from vllm.inflight.worker.worker_state import WorkerState

BUFFER = torch.arange(300, dtype=torch.float32)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What upstream's allocator is asked for."""
    asked: list[str] = []
    allocator = SimpleNamespace(
        sleep=lambda offload_tags: asked.append(f"sleep {offload_tags[0]}"),
        wake_up=lambda tags: asked.append(f"wake {tags}"),
        discard=lambda tags: asked.append(f"discard {tags}"),
    )
    monkeypatch.setattr(
        "vllm.device_allocator.get_mem_allocator_instance", lambda: allocator
    )
    return asked


class Worker:
    """Weights and a buffer in an arena, a second set, and the sleep of both."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.buffer = arena.empty(BUFFER.shape).copy_(BUFFER)
        self.sets = Sets(arena)
        shadow = self.sets.shadow
        shadow.arenas = (arena,)
        shadow.pair = lambda: ShadowModel.pair(shadow)
        stager = self.sets.stager
        self.state = WorkerState(stager=stager).attach(stager.worker)
        self.backend = SleepBackend(stager, arena)

    def publish(self, seed: int) -> None:
        self.sets.shadow.pair()
        self.sets.stage(version(seed).items())
        self.sets.stager.flip()

    def watch(self) -> Tripwire:
        """A tripwire over the live weights, as upstream's loader gives a worker one."""
        live, worker = self.sets.live, self.sets.stager.worker
        rank: Any = SimpleNamespace(
            device=torch.device("cpu"),
            model_runner=SimpleNamespace(
                get_model=lambda: live, get_draft_model=lambda: None
            ),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(enable_eplb=False),
                speculative_config=None,
            ),
        )
        self.state.tripwire = wire = Tripwire(rank)
        assert WorkerState.find(worker) is self.state
        return wire

    def serves(self, seed: int) -> bool:
        return shows(self.sets.live, version(seed)) and torch.equal(self.buffer, BUFFER)


@pytest.fixture
def worker(asked: list[str]) -> Iterator[Worker]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield Worker(arena)


@pytest.mark.parametrize(
    "sleep",
    [lambda backend: backend.suspend(1), lambda backend: backend.discard(("weights",))],
)
def test_a_sleep_unmaps_the_memory_of_a_trainer(
    worker: Worker, sleep: Callable[[SleepBackend], None]
) -> None:
    memory = HostMemory()
    named = {"a": torch.randn(40)}
    transport = lent_to.worker(memory)
    lent_to.receive(transport, lent(named, memory))
    assert memory.mapped == {named["a"].data_ptr()}
    worker.sets.stager.worker.weight_transfer_engine = transport
    sleep(worker.backend)
    assert not memory.mapped
    # It is mapped again by the next update, and unmapped before the KV cache is back.
    lent_to.receive(transport, lent(named, memory))
    assert memory.mapped == {named["a"].data_ptr()}
    worker.backend.resume(["kv_cache"])
    assert not memory.mapped


def test_a_level_1_sleep_restores_every_weight_at_its_address(
    worker: Worker, asked: list[str]
) -> None:
    worker.publish(1)
    places = [p.data_ptr() for p in worker.sets.live.parameters()]
    worker.backend.suspend(1)
    assert worker.arena.stats()["backed_bytes"] == 0
    worker.backend.resume(["kv_cache"])
    assert worker.arena.stats()["backed_bytes"] == 0
    worker.backend.resume(["weights"])
    assert worker.serves(1)
    assert places == [p.data_ptr() for p in worker.sets.live.parameters()]
    assert asked == ["sleep weights", "wake ['kv_cache']", "wake ['weights']"]
    worker.publish(2)
    assert worker.serves(2)


def test_a_level_2_sleep_keeps_buffers_and_loses_weights(
    worker: Worker, asked: list[str]
) -> None:
    for seed in range(1, 6):
        worker.backend.suspend(2)
        assert worker.arena.stats()["backed_bytes"] == 0
        worker.backend.resume(["weights"])
        assert not any(p.any() for p in worker.sets.live.parameters())
        assert torch.equal(worker.buffer, BUFFER)
        worker.publish(seed)
        assert worker.serves(seed)
        worker.backend.resume(["kv_cache"])
    assert asked[0] == "sleep runtime" and len(asked) == 15


def test_a_sleep_drops_the_rollback_target(worker: Worker) -> None:
    worker.publish(1)
    worker.backend.suspend(1)
    worker.backend.resume()
    with pytest.raises(RuntimeError, match="nothing is left to return to"):
        worker.sets.stager.flip("before")
    assert worker.serves(1) and worker.sets.stager.served is not None


def test_the_served_contents_are_unknown_after_a_level_2_sleep(worker: Worker) -> None:
    worker.publish(1)
    worker.backend.suspend(2)
    worker.backend.resume()
    assert worker.sets.stager.served is None


def test_weights_that_were_filled_in_place_are_carried_into_the_next_subset(
    worker: Worker,
) -> None:
    worker.backend.suspend(2)
    worker.backend.resume()
    worker.sets.live.load_weights(version(3).items())  # upstream's reload_weights
    norm = {"norm": version(4)["norm"]}
    worker.sets.stage(norm.items(), subset=["norm"])
    worker.sets.stager.flip()
    assert worker.serves(3) is False
    assert shows(worker.sets.live, version(3) | norm)


def test_a_subset_copies_weights_overwritten_while_awake(worker: Worker) -> None:
    worker.publish(1)
    norm = {"norm": version(2)["norm"]}
    worker.sets.stage(norm.items(), subset=["norm"])
    worker.sets.stager.flip()  # the two sets differ in this alone
    worker.sets.live.load_weights(version(3).items())
    stager, wire = worker.sets.stager, SimpleNamespace(acknowledge=lambda: None)
    state = WorkerState(stager=stager, tripwire=wire)
    overwritten(SimpleNamespace(vllm_inflight=state))
    with pytest.raises(RuntimeError, match="nothing is left to return to"):
        worker.sets.stager.flip("before")
    assert worker.sets.stager.served is None
    norm = {"norm": version(4)["norm"]}
    worker.sets.stage(norm.items(), subset=["norm"])
    worker.sets.stager.flip()
    assert shows(worker.sets.live, version(3) | norm)


def test_missing_shadow_memory_after_a_wake_up_is_obtained_by_the_next_update(
    worker: Worker,
) -> None:
    one = sum(num_bytes for _, num_bytes in worker.arena.runs())
    worker.backend.suspend(1)
    limit(worker.arena, budget=one)
    worker.backend.resume()
    assert worker.serves(0) and worker.arena.phase == "consolidated"
    limit(worker.arena)
    worker.publish(1)
    assert worker.serves(1)


def test_a_wake_up_without_room_can_be_repeated(
    worker: Worker, asked: list[str]
) -> None:
    worker.publish(1)
    worker.backend.suspend(1)
    limit(worker.arena, budget=0)
    with pytest.raises(Exception, match="lacks"):
        worker.backend.resume()
    assert asked == ["sleep weights"]
    limit(worker.arena)
    worker.backend.resume()
    assert worker.serves(1)


def test_a_sleep_is_rejected_before_any_change_if_the_host_lacks_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.publish(1)

    def fail(*_: Any) -> None:
        raise RuntimeError("the host lacks memory")

    monkeypatch.setattr("vllm.inflight.worker.sleep.HostCopy", fail)
    for call in (worker.backend.prepare, worker.backend.suspend):
        with pytest.raises(RuntimeError, match="lacks memory"):
            call(1)
    assert worker.arena.phase == "paired" and worker.serves(1)
    worker.sets.stager.flip("before")
    assert worker.serves(0)


def test_a_copy_for_a_sleep_that_never_came_is_not_restored(
    worker: Worker,
) -> None:
    worker.backend.prepare(1)
    worker.publish(1)
    worker.backend.resume()
    assert worker.serves(1)
    worker.backend.prepare(1)
    worker.publish(2)
    worker.backend.prepare(0)
    worker.backend.suspend(1)
    worker.backend.prepare(0)  # too late to take back
    worker.backend.resume()
    assert worker.serves(2)


@pytest.mark.parametrize("call", ["unmap", "release"])
def test_a_failed_sleep_changes_nothing_and_keeps_no_backup(
    worker: Worker, call: str
) -> None:
    worker.publish(1)
    num_runs = len(worker.arena.runs())
    limit(worker.arena, call=call, skip=num_runs, times=1)  # of the live set
    with pytest.raises(ArenaFault, match=call):
        worker.backend.suspend(1)
    limit(worker.arena)
    worker.backend.resume()
    assert worker.serves(1) and worker.backend._backup is None
    worker.publish(2)
    worker.backend.suspend(1)
    worker.backend.resume()
    assert worker.serves(2)


def test_an_arena_that_a_sleep_has_torn_does_not_wake_up(asked: list[str]) -> None:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        first, hole = arena.empty((1,)), arena.empty((1 << 20,))
        kept = arena.empty((1,))
        del hole
        worker = Worker(arena)
        arena.unpair()
        assert len(arena.runs()) == 2 and arena.contains(first) and arena.contains(kept)
        # One run is unmapped, the next one is not, and the first one stays away.
        limit(arena, skip=2, times=2)
        with pytest.raises(ArenaTorn, match="cannot be put back"):
            worker.backend.suspend(1)
        limit(arena)
        for tags in (["weights"], None):
            with pytest.raises(ArenaTorn, match="a sleep failed"):
                worker.backend.resume(tags)
        assert asked == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_log_is_given_back_with_the_weights_of_an_arena(
    worker: Worker, level: int
) -> None:
    """Staging `auto` takes a log beside an arena that has no room for a second set."""
    worker.arena.unpair()
    shadow = worker.sets.shadow
    shadow.arenas, shadow.log = (), ChangeLog(torch.device("cpu"), 1 << 10)
    worker.backend.suspend(level)
    assert shadow.log._memory is None
    worker.backend.resume(["kv_cache"])
    assert shadow.log._memory is None
    worker.backend.resume(["weights"])
    assert shadow.log._memory is not None and worker.arena.phase == "consolidated"
    assert worker.serves(0) or level == 2


@pytest.mark.parametrize(
    ("sleep", "is_kept"),
    [
        (lambda backend: backend.suspend(1), True),
        (lambda backend: backend.suspend(2), False),
        (lambda backend: backend.discard(("weights",)), False),
        (lambda backend: (backend.prepare(1), backend.discard(("weights",))), True),
    ],
)
def test_whoever_calls_the_backend_the_tripwire_knows_which_weights_sleep(
    worker: Worker, sleep: Callable[[SleepBackend], None], *, is_kept: bool
) -> None:
    wire = worker.watch()
    sleep(worker.backend)
    told = wire.look()
    assert told.asleep == ["weights"]
    assert told.lost == ([] if is_kept else ["weights"])
    wire.acknowledge_sleep()
    worker.backend.resume(["kv_cache"])
    assert wire.is_asleep and not wire.look().woken
    worker.backend.resume(["weights"])
    told = wire.look()
    assert (told.asleep, told.woken) == ([], ["weights"])
    assert worker.serves(0) is is_kept
    # Weights that are lost are marked, although the engine core has taken note.
    num = len(list(worker.sets.live.parameters()))
    assert told.num_missing == told.num_required == (0 if is_kept else num)


@pytest.mark.parametrize("call", ["suspend", "discard"])
def test_weights_do_not_sleep_while_an_update_is_staged(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    wire = worker.watch()
    worker.publish(1)
    with monkeypatch.context() as patch:
        patch.setattr(type(worker.sets.stager), "is_busy", True)
        with pytest.raises(UpdateBusy, match="while an update is staged"):
            getattr(worker.backend, call)(1 if call == "suspend" else ("weights",))
    assert worker.arena.phase == "paired" and worker.serves(1) and not wire.is_asleep
    worker.publish(2)
    worker.backend.suspend(1)
    worker.backend.resume()
    assert worker.serves(2)  # no copy was left of the weights before


def test_sleeping_twice_is_sleeping_once(worker: Worker) -> None:
    worker.backend.suspend(1)
    worker.backend.suspend(1)
    worker.backend.resume()
    worker.backend.resume()
    assert worker.serves(0)


def test_discarded_weights_are_lost_as_after_a_level_2_sleep(
    worker: Worker, asked: list[str]
) -> None:
    worker.backend.discard(("kv_cache",))
    assert worker.serves(0)
    worker.backend.discard(("weights",))
    assert worker.arena.stats()["backed_bytes"] == 0
    worker.backend.resume()
    assert torch.equal(worker.buffer, BUFFER)
    assert not any(p.any() for p in worker.sets.live.parameters())


def test_sleep_mode_with_staging_off_is_rejected_at_the_start(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager: Any = SimpleNamespace(
        shadow=SimpleNamespace(live=torch.nn.Module(), reason="it says so"),
        worker=SimpleNamespace(vllm_config=None),
    )
    monkeypatch.setattr("vllm.inflight.worker.sleep.is_wanted", lambda _: True)
    with pytest.raises(ConfigError, match="staging off"):
        backend_of(stager)
    monkeypatch.setattr("vllm.inflight.worker.sleep.is_wanted", lambda _: False)
    assert backend_of(stager) is None  # upstream's own
    state = ModelState.of(stager.shadow.live)
    state.set(placement.Placement(worker.arena, "no"))
    assert isinstance(backend_of(stager), SleepBackend)  # no updates, but sleep
