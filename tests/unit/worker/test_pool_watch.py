"""The watch of upstream's memory pools, whose allocator runs on host memory."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines.pools_on_host import Pools
from vllm.inflight.worker.worker_state import WorkerState


class Worker:
    """Has weights and a KV cache, and a list of what was noted of them."""

    def __init__(self) -> None:
        model = torch.nn.Linear(4, 4, bias=False)
        self.model_runner = SimpleNamespace(
            get_model=lambda: model, kv_caches=[torch.ones(4)]
        )
        self.noted: list[Any] = []
        wire: Any = SimpleNamespace(
            is_asleep=False,
            note_asleep=lambda *noted: self.noted.append(noted),
            note_awake=lambda parts, kept: self.noted.append(parts),
        )
        WorkerState(tripwire=wire).attach(self)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    return Pools(monkeypatch)


def test_each_call_of_the_allocator_is_noted_with_the_parts_that_it_names(
    pools: Pools,
) -> None:
    worker, both = Worker(), {"weights", "kv_cache"}
    pools.hold(worker)
    pools.allocator().sleep("weights")
    pools.allocator().wake_up(["weights", "cudagraph"])
    pools.allocator().discard(("weights", "runtime"))
    pools.allocator().wake_up()
    pools.allocator().discard("kv_cache")
    assert worker.noted == [
        (both, {"weights"}),
        {"weights"},
        ({"weights"}, set()),
        both,
        ({"kv_cache"}, set()),
    ]


def test_weights_outside_of_the_pools_do_not_sleep_with_them(pools: Pools) -> None:
    worker = Worker()
    pools.hold(worker)
    allocator = pools.allocator()
    for place, of in list(allocator.pointer_to_data.items()):
        if of.tag == "weights":
            del allocator.pointer_to_data[place]
    allocator.sleep()
    allocator.wake_up()
    assert worker.noted == [({"kv_cache"}, {allocator.default_tag}), {"kv_cache"}]


def test_the_watch_does_not_keep_a_worker_alive_and_the_next_one_takes_its_place(
    pools: Pools,
) -> None:
    first, second = Worker(), Worker()
    gone = weakref.ref(first)
    pools.hold(first)
    pools.hold(second)
    pools.allocator().discard("kv_cache")
    assert (first.noted, len(second.noted)) == ([], 1)
    pools.hold(first)
    pools.release()
    del first
    gc.collect()
    assert gone() is None
    pools.allocator().wake_up()  # of a worker that has ended
    assert len(second.noted) == 1
