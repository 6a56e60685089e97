"""Loading an adapter on two ranks: both take it, or neither does."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.lora.request import LoRARequest

from vllm.inflight.engine.scheduling.lora import load_everywhere
from vllm.inflight.errors import EngineFault, Malformed
from vllm.inflight.patch.worker_rpc import inflight_adapter
from vllm.inflight.worker import lora


class Read(NamedTuple):
    """An adapter in the host's memory."""

    id: int
    text: str


class Registry:
    """What of upstream's registry a proposal needs: it has room for one."""

    def __init__(self) -> None:
        self.loaded: dict[int, Read] = {}
        self._registered_adapters = SimpleNamespace(pinned_items=set[int]())

    def list_adapters(self) -> dict[int, Read]:
        return dict(self.loaded)

    def add_adapter(self, adapter: Read) -> bool:
        self.loaded.setdefault(adapter.id, adapter)
        assert len(self.loaded) == 1
        return True


class Manager:
    """A rank's adapters; reads what `files` says, and cannot take `unfit`."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.unfit = ""
        self._adapter_manager = Registry()

    def list_adapters(self) -> set[int]:
        return set(self._adapter_manager.loaded)

    def _load_adapter(self, request: Any) -> Read:
        return Read(request.lora_int_id, self.files[request.lora_path])

    def add_adapter(self, request: Any) -> bool:
        read = self._load_adapter(request)
        self._adapter_manager.loaded.clear()
        if read.text == self.unfit:
            raise ValueError("it does not fit")
        self._adapter_manager.loaded[request.lora_int_id] = read
        return True

    def remove_adapter(self, number: int) -> bool:
        return self._adapter_manager.loaded.pop(number, None) is not None


class Ranks:
    """Two ranks, as an executor reaches them; an RPC of theirs must not raise."""

    def __init__(self) -> None:
        self.managers = [Manager({"a": "A", "b": "B"}) for _ in range(2)]
        self.workers = [
            SimpleNamespace(
                model_runner=SimpleNamespace(lora_manager=manager),
                vllm_config=SimpleNamespace(additional_config={}),
            )
            for manager in self.managers
        ]

    def collective_rpc(self, method: str, args: Any) -> list[dict[str, Any]]:
        assert method == "inflight_adapter"
        return [inflight_adapter(worker, *args) for worker in self.workers]

    @property
    def served(self) -> list[dict[int, str]]:
        loaded = (manager._adapter_manager.loaded for manager in self.managers)
        return [{number: read.text for number, read in each.items()} for each in loaded]


def request(path: str, number: int = 1, *, load_inplace: bool = True) -> LoRARequest:
    return LoRARequest("name", number, path, load_inplace=load_inplace)


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks()
    assert load_everywhere(ranks, request("a"))
    assert ranks.served == [{1: "A"}, {1: "A"}]
    return ranks


def test_both_ranks_take_an_adapter_that_both_have_read(ranks):
    assert load_everywhere(ranks, request("b"))
    assert ranks.served == [{1: "B"}, {1: "B"}]


def test_an_adapter_that_one_rank_cannot_read_loads_on_neither(ranks):
    del ranks.managers[1].files["b"]
    with pytest.raises(Malformed, match=r"'name' cannot be loaded.*KeyError"):
        load_everywhere(ranks, request("b"))
    assert ranks.served == [{1: "A"}, {1: "A"}]


def test_an_adapter_that_one_rank_cannot_load_is_undone_on_the_other(ranks):
    ranks.managers[1].unfit = "B"
    with pytest.raises(EngineFault, match=r"no rank.*it does not fit"):
        load_everywhere(ranks, request("b"))
    assert ranks.served == [{1: "A"}, {1: "A"}]


def test_an_adapter_that_was_evicted_is_restored_when_loading_fails(ranks):
    ranks.managers[1].unfit = "B"
    with pytest.raises(EngineFault):
        load_everywhere(ranks, request("b", 2))
    assert ranks.served == [{1: "A"}, {1: "A"}]


def test_a_needed_adapter_is_kept_when_evicted_and_its_files_are_gone(ranks):
    """As a step has it then, which asks upstream's manager."""
    first = request("a", load_inplace=False)
    load_everywhere(ranks, request("b", 2), needed=[lora.key_of(first)])
    assert ranks.served == [{2: "B"}, {2: "B"}]
    for manager in ranks.managers:
        manager.files.clear()
    assert not load_everywhere(ranks, first, needed=[lora.key_of(first)])
    for manager in ranks.managers:
        assert lora.kept_or_read(manager, first, manager._load_adapter).text == "A"


def test_adapters_that_are_not_needed_are_not_kept(ranks):
    load_everywhere(ranks, request("b", 2), needed=())
    for manager in ranks.managers:
        assert list(lora._kept(manager)) == [("name", 2)]


def test_a_load_that_failed_keeps_what_was_kept(ranks):
    first = request("a", load_inplace=False)
    ranks.managers[1].unfit = "B"
    with pytest.raises(EngineFault):
        load_everywhere(ranks, request("b"))
    for manager in ranks.managers:
        assert lora.kept_or_read(manager, first, manager._load_adapter).text == "A"


def test_a_new_adapter_is_on_no_rank_after_a_failure():
    ranks = Ranks()
    ranks.managers[1].unfit = "B"
    with pytest.raises(EngineFault):
        load_everywhere(ranks, request("b"))
    assert ranks.served == [{}, {}]


def test_a_loaded_adapter_is_read_again_only_on_request(ranks):
    for manager in ranks.managers:
        manager.files.clear()
    assert not load_everywhere(ranks, request("a", load_inplace=False))


def test_a_finished_adapter_load_leaves_no_read_adapter_to_take(ranks):
    assert not lora.step(ranks.workers[0], "take", request("a"))
