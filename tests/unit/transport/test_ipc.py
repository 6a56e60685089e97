"""A trainer on the same host lends its tensors: read where they lie, byte by byte.

On host memory here; tests/gpu reads another GPU's.
"""

from __future__ import annotations

import json
import multiprocessing
from itertools import chain
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.transports.host_memory import HostMemory
from tests.support.transports.lent_to import receive, worker
from tests.support.transports.peers import (
    Recorder,
    digests,
    tensors,
)
from vllm.inflight import upstream
from vllm.inflight.errors import Cancelled, Malformed, TransferFault
from vllm.inflight.transport.buckets.reassembly import Destination
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.cuda_ipc import handles, lent_tensors
from vllm.inflight.transport.cuda_ipc.driver import HANDLE_BYTES, CudaMemory
from vllm.inflight.transport.cuda_ipc.handles import Exporter, Exports, Mappings
from vllm.inflight.transport.cuda_ipc.receiver_engine import Reader

ANOTHER = "another process"


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


def lent(named: dict[str, torch.Tensor], memory: HostMemory) -> dict[str, Any]:
    """The `update_info` of a trainer in another process, as JSON brings it."""
    held = {name: tensor.contiguous() for name, tensor in named.items()}
    named.update(held)
    memory.show(held)
    plain = Exports.of(list(held.values()), memory).plain | {"process": ANOTHER}
    info = TensorList.of(held.items()).update_info | {"exports": plain}
    told: dict[str, Any] = json.loads(json.dumps(info))
    return told


@pytest.mark.parametrize("num_buckets", [1, 2, 5])
def test_every_byte_is_read(memory: HostMemory, num_buckets: int) -> None:
    engine = worker(memory, num_buckets=num_buckets)
    for seed in (1, 2):
        named = tensors(seed)
        receive(engine, lent(named, memory))
        assert digests(engine.model.loaded.items()) == digests(named.items())
    engine.shutdown()
    assert not memory.mapped


def test_tensors_that_share_an_allocation_are_located_within_it(
    memory: HostMemory,
) -> None:
    whole = torch.arange(10_000, dtype=torch.int32)
    named = {"first": whole[:10], "second": whole[700:9000], "third": whole[9999:]}
    info = lent(named, memory)
    assert len(info["exports"]["handles"]) == 1
    engine = worker(memory)
    receive(engine, info)
    assert digests(engine.model.loaded.items()) == digests(named.items())


def test_large_tensors_are_read_into_their_places(memory: HostMemory) -> None:
    named = {"large": torch.randn(1 << 19), "small": torch.randn(5)}
    target = torch.zeros(1 << 19)

    class Placing(Recorder):
        def load_weights(self, weights: Any) -> None:
            home = Destination.of(target)
            weights.into(lambda name, *_: home if name == "large" else None)
            super().load_weights(weights)

    engine = worker(memory, Placing(), bucket_bytes=1 << 20)
    receive(engine, lent(named, memory))
    assert torch.equal(target, named["large"])
    assert digests(engine.model.loaded.items()) == digests(named.items())


@pytest.fixture
def packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(upstream, name, lambda *_: None, raising=False)


@pytest.mark.usefixtures("packs_nothing")
def test_memory_is_mapped_once_and_unmapped_when_it_is_no_longer_lent(
    memory: HostMemory,
) -> None:
    engine = worker(memory)
    first, second = {"a": torch.randn(40)}, {"a": torch.randn(41)}
    for _ in range(3):
        engine.start_weight_update()
        receive(engine, lent(first, memory))
        engine.finish_weight_update()
    assert memory.num_maps == 1
    engine.start_weight_update()
    receive(engine, lent(second, memory))
    assert len(memory.mapped) == 2
    engine.finish_weight_update()
    assert memory.mapped == {second["a"].data_ptr()}


@pytest.mark.usefixtures("packs_nothing")
def test_memory_stays_mapped_while_the_trainer_that_lent_it_has_it(
    memory: HostMemory,
) -> None:
    engine, exporter = worker(memory), Exporter(memory)
    kept, others = torch.randn(40), [torch.randn(41 + number) for number in range(3)]
    memory.show({str(number): t for number, t in enumerate([kept, *others])})

    def update(*tensors: torch.Tensor) -> None:
        engine.start_weight_update()
        for number, tensor in enumerate(tensors):
            plain = exporter.export([tensor]).plain | {"process": ANOTHER}
            info = TensorList.of([(str(number), tensor)]).update_info
            receive(engine, json.loads(json.dumps(info | {"exports": plain})))
        engine.finish_weight_update()

    for named in ([kept], others, [kept], [others[1]]):
        update(*named)
    assert memory.mapped == {tensor.data_ptr() for tensor in [kept, *others]}
    assert memory.num_maps == 4
    memory.free(others[0])
    update(others[1])
    assert memory.mapped == {t.data_ptr() for t in [kept, *others[1:]]}
    # What another trainer had lent is released at its update.
    update_of_another = lent({"a": torch.randn(3)}, memory)
    update_of_another["exports"]["process"] = "a third one"
    engine.start_weight_update()
    receive(engine, update_of_another)
    engine.finish_weight_update()
    assert len(memory.mapped) == 1


@pytest.mark.parametrize("held", [7, "!", "AAAA", None])
def test_held_memory_without_whole_handles_is_rejected(
    memory: HostMemory, held: Any
) -> None:
    info = lent({"a": torch.randn(40)}, memory)
    info["exports"]["held"] = held
    with pytest.raises(ValueError, match=r"'held' is handles of 64 bytes each"):
        worker(memory).parse_update_info(info)


@pytest.mark.usefixtures("packs_nothing")
def test_memory_of_the_first_call_stays_mapped_though_its_first_write_comes_later(
    memory: HostMemory,
) -> None:
    class Starting(Recorder):
        """As the staging thread does: an update starts with its first write."""

        def load_weights(self, weights: Any) -> None:
            engine.start_weight_update()
            super().load_weights(weights)

    engine = worker(memory, Starting())
    named = {"a": torch.randn(40)}
    for _ in range(3):
        receive(engine, lent(named, memory))
        engine.finish_weight_update()
    assert memory.num_maps == 1


@pytest.mark.usefixtures("packs_nothing")
def test_an_aborted_update_unmaps_what_the_trainer_has_no_more(
    memory: HostMemory,
) -> None:
    engine = worker(memory)
    whole, broken = {"a": torch.randn(40)}, {"a": torch.randn(41)}
    engine.start_weight_update()
    receive(engine, lent(whole, memory))
    engine.finish_weight_update()
    engine.abort_weight_update()  # of an update that was rejected at once
    assert memory.mapped == {whole["a"].data_ptr()}
    receive(engine, lent(broken, memory))
    engine.abort_weight_update()
    assert memory.mapped == {broken["a"].data_ptr()}


@pytest.mark.usefixtures("packs_nothing")
def test_memory_of_an_aborted_update_is_unmapped_by_the_next_update(
    memory: HostMemory,
) -> None:
    engine = worker(memory)
    broken, second = {"a": torch.randn(40)}, {"a": torch.randn(41)}
    engine.start_weight_update()
    receive(engine, lent(broken, memory))
    engine.abort_weight_update()
    engine.start_weight_update()
    receive(engine, lent(second, memory))
    engine.finish_weight_update()
    assert memory.mapped == {second["a"].data_ptr()}


def test_a_trainer_in_the_engines_own_process_maps_nothing(memory: HostMemory) -> None:
    named = {"a": torch.randn(40)}
    info = lent(named, memory)
    info["exports"]["process"] = handles.process()
    engine = worker(memory)
    receive(engine, info)
    assert digests(engine.model.loaded.items()) == digests(named.items())
    assert memory.num_maps == 0


def test_a_forked_process_has_an_identity_of_its_own(memory: HostMemory) -> None:
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1) as pool:
        assert pool.apply(handles.process) != handles.process()


def test_a_trainer_on_another_host_is_rejected(memory: HostMemory) -> None:
    info = lent({"a": torch.randn(40)}, memory)
    info["exports"]["host"] = "elsewhere"
    with pytest.raises(Malformed, match="another host"):
        receive(worker(memory), info)


def test_a_place_outside_of_its_allocation_is_rejected(memory: HostMemory) -> None:
    info = lent({"a": torch.randn(40)}, memory)
    info["exports"]["places"] = [[0, 8]]
    engine = worker(memory)
    with pytest.raises(Malformed, match="bytes 8 to 168 of an allocation of 160"):
        receive(engine, info)
    assert memory.copied == []


def test_memory_that_cannot_be_mapped_says_what_to_do(memory: HostMemory) -> None:
    info = lent({"a": torch.randn(40)}, memory)
    memory.exported.clear()
    with pytest.raises(TransferFault, match=r"INVALID_VALUE.*inflight_nccl"):
        receive(worker(memory), info)


def test_memory_that_cannot_be_exported_says_what_to_do(memory: HostMemory) -> None:
    with pytest.raises(ValueError, match="expandable_segments"):
        Exports.of([torch.randn(4)], memory)


def test_a_cancelled_update_stops_reading_and_the_next_one_works(
    memory: HostMemory,
) -> None:
    named = tensors(3)
    info = lent(named, memory)

    class Stopping(Recorder):
        def load_weights(self, weights: Any) -> None:
            for _ in weights:
                raise Cancelled("enough")

    engine = worker(memory, Stopping(), num_buckets=1)
    with pytest.raises(Cancelled):
        receive(engine, info)
    assert sum(memory.copied) < sum(t.nbytes for t in named.values())
    engine.model = Recorder()
    receive(engine, info)
    assert digests(engine.model.loaded.items()) == digests(named.items())


def test_a_shutdown_while_it_reads_stops_it_before_memory_is_unmapped(
    memory: HostMemory,
) -> None:
    """As a worker's whose engine ends: in its main thread, while another receives."""

    class Leaving(Recorder):
        def load_weights(self, weights: Any) -> None:
            for _ in weights:
                engine.shutdown()
                assert not memory.mapped and engine.gauges == {}
                copied.append(len(memory.copied))

    copied: list[int] = []
    engine = worker(memory, Leaving(), num_buckets=1)
    with pytest.raises(TransferFault, match="was shut down"):
        receive(engine, lent(tensors(3), memory))
    assert len(memory.copied) == copied[0]
    with pytest.raises(TransferFault, match="was not prepared"):
        receive(engine, lent(tensors(3), memory))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host": 5}, "lacks the string 'host'"),
        ({"handles": "x"}, "lacks the list 'handles'"),
        ({"handles": ["AAAA"]}, "a handle is 64 bytes in base64"),
        ({"handles": [7]}, "a handle is 64 bytes in base64"),
        ({"bases": []}, "0 'bases' for 1 'handles'"),
        ({"bases": [-1]}, "'bases' is no number of bytes"),
        ({"gpus": 1}, "lacks the list 'gpus'"),
        ({"gpus": [7]}, "'gpus' does not name the GPU of each"),
        ({"gpus": ["a", "b"]}, "'gpus' does not name the GPU of each"),
        ({"places": []}, "0 'places' for 1 tensors"),
        ({"places": [[0]]}, "is no place"),
        ({"places": [[1, 0]]}, "there is no handle 1, only 1"),
        ({"places": [[0, True]]}, "'places' is no number of bytes"),
    ],
)
def test_exports_that_cannot_be_read_are_rejected_by_name(
    memory: HostMemory, changes: dict[str, Any], named: str
) -> None:
    info = lent({"a": torch.randn(40)}, memory)
    info["exports"] |= changes
    with pytest.raises(ValueError, match=named):
        worker(memory).parse_update_info(info)


def test_a_tensor_without_a_handle_is_rejected(memory: HostMemory) -> None:
    info = lent({"a": torch.randn(40)}, memory)
    info["exports"] |= {"handles": [], "bases": [], "gpus": []}
    with pytest.raises(Malformed, match="there is no handle 0"):
        receive(worker(memory), info)


def test_tensors_without_elements_need_no_memory(memory: HostMemory) -> None:
    named = {"nothing": torch.empty(0, 3)}
    engine = worker(memory)
    receive(engine, lent(named, memory))
    assert engine.model.loaded["nothing"].shape == (0, 3)


def test_a_cpu_engine_is_rejected_with_the_backend_to_use_instead(
    memory: HostMemory,
) -> None:
    engine = worker(memory)
    with pytest.raises(Malformed, match="use the backend local"):
        engine.init_transfer_engine(engine.parse_init_info({}))
    with pytest.raises(TransferFault, match="init_weight_transfer_engine"):
        receive(engine, lent({"a": torch.randn(4)}, memory))


def test_a_trainer_that_prepares_the_engine_frees_the_memory_of_the_one_before(
    memory: HostMemory,
) -> None:
    engine = worker(memory)
    receive(engine, lent({"a": torch.randn(40)}, memory))
    assert memory.mapped
    # Whoever prepares a GPU's engine comes here first.
    with pytest.raises(Malformed, match="use the backend local"):
        engine.init_transfer_engine(engine.parse_init_info({}))
    assert not memory.mapped


def test_closing_the_mappings_unmaps_everything(memory: HostMemory) -> None:
    info = lent({"a": torch.randn(40)}, memory)
    mappings = Mappings(memory)
    mappings.find(Exports.parse(info["exports"], 1), [160])
    assert len(mappings) == 1
    mappings.close()
    assert len(mappings) == 0
    assert not memory.mapped


def test_a_failed_unmap_does_not_keep_other_memory_mapped(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {name: torch.randn(40) for name in "ab"}
    info = lent(named, memory)
    mappings = Mappings(memory)
    mappings.find(Exports.parse(info["exports"], 2), [160] * 2)
    unmap, failing = memory.unmap, iter([TransferFault("first"), TransferFault("last")])

    def unmapped(address: int) -> None:
        unmap(address)
        raise next(failing)

    monkeypatch.setattr(memory, "unmap", unmapped)
    mappings.end_update()
    mappings.find(
        Exports.parse(lent({"d": torch.randn(9)}, memory)["exports"], 1), [36]
    )
    with pytest.raises(TransferFault, match="first"):
        mappings.end_update()
    assert (len(mappings), len(memory.mapped)) == (1, 1)


def test_memory_of_unknown_size_is_unmapped_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []

    def opened(address: Any, *_: Any) -> int:
        address._obj.value = 7
        return 0

    stream = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    cuda = object.__new__(CudaMemory)
    cuda._library = SimpleNamespace(
        cuIpcOpenMemHandle_v2=opened,
        cuMemGetAddressRange_v2=lambda *_: 1,
        cuIpcCloseMemHandle=lambda address: closed.append(address) or 0,
        cuGetErrorName=lambda *_: 0,
    )
    with pytest.raises(TransferFault, match="cuMemGetAddressRange"):
        cuda.map(bytes(HANDLE_BYTES))
    assert closed == [7]


class Lending(Recorder):
    """Takes the trainer's memory itself, where it is offered."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: dict[str, int] = {}
        self.batches: list[list[str]] = []
        self.was_offered = False

    def load_weights(self, weights: Any) -> None:
        self.was_offered = hasattr(weights, "lend")
        if not self.was_offered:
            super().load_weights(weights)
            return
        weights.lend()
        for batch in weights.batches():
            self.batches.append([name for name, _ in batch])
            self.addresses |= {name: tensor.data_ptr() for name, tensor in batch}
            super().load_weights(iter(batch))


def test_tensors_on_the_workers_own_gpu_can_be_read_where_they_lie(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tensors(7)
    sizes = [tensor.nbytes for tensor in named.values()]
    monkeypatch.setattr(lent_tensors, "AT_ONCE_BYTES", sum(sizes) // 3)
    model = Lending()
    engine = worker(memory, model)
    for _ in range(2):
        receive(engine, lent(named, memory))
        assert digests(model.loaded.items()) == digests(named.items())
    assert memory.copied == []
    assert model.addresses == {
        name: tensor.data_ptr() if tensor.numel() else 0
        for name, tensor in named.items()
    }
    assert 2 * 2 < len(model.batches) < 2 * len(named)
    assert [*dict.fromkeys(chain(*model.batches))] == list(named)


@pytest.mark.parametrize("gpus", [["another"], []])
def test_tensors_of_another_gpu_are_copied(memory: HostMemory, gpus: list[str]) -> None:
    named = {"a": torch.randn(40)}
    info, model = lent(named, memory), Lending()
    info["exports"]["gpus"] = gpus
    receive(worker(memory, model), info)
    assert not model.was_offered and sum(memory.copied) == 160
    assert digests(model.loaded.items()) == digests(named.items())


def test_a_tensor_at_an_odd_address_is_copied(memory: HostMemory) -> None:
    named, model = {"a": torch.randn(40)}, Lending()
    info = lent(named, memory)
    info["exports"]["places"] = [[0, 1]]
    info["shapes"] = [[30]]
    receive(worker(memory, model), info)
    assert not model.was_offered and sum(memory.copied) == 120


def test_memory_that_is_read_where_it_lies_stays_mapped_until_it_was_read(
    memory: HostMemory,
) -> None:
    class Leaving(Lending):
        def load_weights(self, weights: Any) -> None:
            weights.lend()
            batches = weights.batches()
            next(batches)
            engine.shutdown()
            assert memory.mapped
            for _ in batches:
                raise AssertionError("a batch after the shutdown")

    engine = worker(memory, Leaving())
    lent_tensors_at_once = {str(n): torch.randn(40) for n in range(3)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lent_tensors, "AT_ONCE_BYTES", 1)
        with pytest.raises(TransferFault, match="was shut down"):
            receive(engine, lent(lent_tensors_at_once, memory))
    assert not memory.mapped


def test_a_call_ends_only_after_the_stream_that_reads_lent_memory(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model raises: its kernels may be under way."""
    seen: list[str] = []
    for name in ("follow", "close"):
        monkeypatch.setattr(Reader, name, lambda self, name=name: seen.append(name))

    class Failing(Lending):
        def load_weights(self, weights: Any) -> None:
            super().load_weights(weights)
            seen.append("raised")
            raise ValueError("no")

    engine = worker(memory, Failing())
    seen.clear()
    with pytest.raises(ValueError, match="no"):
        receive(engine, lent({"a": torch.randn(40)}, memory))
    assert seen[:3] == ["raised", "follow", "close"]


def test_memory_that_was_unmapped_meanwhile_is_not_lent():
    in_use, nothing = Lock(), TensorList.parse([], [], [])
    lent = lent_tensors.LentTensors(
        *(None, None, nothing, [], in_use),  # type: ignore[arg-type]
        is_mapped=lambda: False,
    )
    with pytest.raises(TransferFault, match="shut down"):
        lent.lend()
    lent.end()
    assert in_use.acquire(blocking=False)
