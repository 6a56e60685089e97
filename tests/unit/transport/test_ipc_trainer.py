"""A trainer that lends: what it asks of a worker, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import ParamMeta

from tests.support.transports.host_memory import HostMemory
from tests.support.transports.lent_to import receive, worker
from tests.support.transports.peers import digests, tensors
from vllm.inflight import ops
from vllm.inflight.delta.decode import apply, decode
from vllm.inflight.delta.parts import ArrivingParts
from vllm.inflight.errors import (
    BaseMismatch,
    DeltaUnsupported,
    InflightError,
    WrongPhase,
)
from vllm.inflight.releases.table import adapter
from vllm.inflight.trainer.deltas.delta import MOST_UNSUPPORTED
from vllm.inflight.trainer.deltas.updates import DeltaUpdates
from vllm.inflight.transport.cuda_ipc.receiver_engine import IpcEngine
from vllm.inflight.transport.cuda_ipc.trainer_engine import (
    IpcTrainer,
    IpcTrainerInitInfo,
)

Tensors = dict[str, torch.Tensor]


_Source: Any = adapter("weight source")


class Source(_Source):
    """A trainer's weights; gathering them may fail after some."""

    def __init__(self, named: Tensors, fails_after: int | None = None) -> None:
        self.named = named
        self.fails_after = fails_after
        self.num_gathered = 0

    def read_facts(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, t.shape) for n, t in self.named.items()]

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(self.named.items()):
            if index == self.fails_after:
                raise RuntimeError("gathering failed")
            self.num_gathered += 1
            yield pair


class Four:
    """Upstream's four calls on a worker, and a list of those that came."""

    def __init__(self, engine: IpcEngine) -> None:
        self.engine = engine
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        receive(self.engine, update_info)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


class Five(Four):
    """Those, and ours."""

    def abort_weight_update(self) -> None:
        self.calls.append("abort")


def trainer(
    source: Source, client: Four, memory: HostMemory, **options: Any
) -> IpcTrainer:
    memory.show({name: tensor.contiguous() for name, tensor in source.named.items()})
    info = IpcTrainerInitInfo(**({"rank": 0} | options))
    return IpcTrainer(info, client=client, source=source, memory=memory)


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def named() -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors(5).items()}


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 4 << 30])
def test_every_tensor_of_a_source_arrives(
    memory: HostMemory, named: Tensors, chunk_bytes: int
) -> None:
    client = Five(worker(memory))
    lender = trainer(Source(named), client, memory, chunk_bytes=chunk_bytes)
    lender.send_weights()
    loaded = client.engine.model.loaded
    assert digests(loaded.items()) == digests(named.items())
    num_calls = client.calls.count("update")
    assert client.calls == ["start", *["update"] * num_calls, "finish"]
    # What a call lends was computed by then, wherever it lies.
    assert memory.settled == [{torch.device("cpu")}] * num_calls
    full = [name for name, tensor in named.items() if tensor.nbytes]
    if chunk_bytes == 1:
        assert num_calls >= len(full)
    elif chunk_bytes > 1000:
        assert num_calls == 1


def test_the_first_chunk_is_ready_before_an_update_is_opened(
    memory: HostMemory, named: Tensors
) -> None:
    seen: list[int] = []

    class Watching(Five):
        def start_weight_update(self) -> None:
            super().start_weight_update()
            seen.append(len(memory.settled))

    trainer(Source(named), Watching(worker(memory)), memory).send_weights()
    assert seen == [1]


def test_a_tensor_elsewhere_is_named_and_nothing_is_begun(
    memory: HostMemory,
) -> None:
    client = Five(worker(memory))
    source = Source({"a": torch.ones(3), "b": torch.ones(3, device="meta")})
    lender = IpcTrainer(
        IpcTrainerInitInfo(rank=0), client=client, source=source, memory=memory
    )
    with pytest.raises(ValueError, match=r"'b' is on meta.*inflight_nccl"):
        lender.send_weights()
    assert client.calls == []


def test_a_source_that_fails_leaves_no_update_open(
    memory: HostMemory, named: Tensors
) -> None:
    client = Five(worker(memory))
    source = Source(named, fails_after=len(named) // 2)
    lender = trainer(source, client, memory, chunk_bytes=1)
    with pytest.raises(RuntimeError, match="gathering failed"):
        lender.send_weights()
    assert client.calls[0] == "start"
    assert client.calls[-1] == "abort"
    assert "finish" not in client.calls
    source.fails_after = None
    lender.send_weights()
    loaded = client.engine.model.loaded
    assert digests(loaded.items()) == digests(named.items())


@pytest.mark.parametrize("refused", ["start", "update"])
def test_a_rejected_rank_gathers_to_the_end_with_the_others(
    memory: HostMemory, named: Tensors, refused: str
) -> None:
    class Refusing(Five):
        def start_weight_update(self) -> None:
            super().start_weight_update()
            if refused == "start":
                raise WrongPhase("not now")

        def update_weights(self, update_info: Any) -> None:
            raise WrongPhase("not now")

    source = Source(named)
    with pytest.raises(WrongPhase, match="not now"):
        trainer(source, Refusing(worker(memory)), memory, chunk_bytes=1).send_weights()
    assert source.num_gathered == len(named)


def test_a_rejected_abort_does_not_hide_the_error_before_it(
    memory: HostMemory, named: Tensors
) -> None:
    class Refusing(Five):
        def abort_weight_update(self) -> None:
            super().abort_weight_update()
            raise WrongPhase("there is no update")

    client = Refusing(worker(memory))
    source = Source(named, fails_after=len(named) // 2)
    with pytest.raises(RuntimeError, match="gathering failed"):
        trainer(source, client, memory, chunk_bytes=1).send_weights()
    assert client.calls[-1] == "abort"


def test_a_client_without_abort_gets_the_original_error(
    memory: HostMemory, named: Tensors
) -> None:
    client = Four(worker(memory))
    source = Source(named, fails_after=len(named) // 2)
    lender = trainer(source, client, memory, chunk_bytes=1)
    with pytest.raises(RuntimeError, match="gathering failed"):
        lender.send_weights()
    assert client.calls[:2] == ["start", "update"]
    assert "abort" not in client.calls


def test_other_ranks_of_a_trainer_gather_and_lend_nothing(
    memory: HostMemory, named: Tensors
) -> None:
    client = Five(worker(memory))
    source = Source(named)
    trainer(source, client, memory, rank=1).send_weights()
    assert source.num_gathered == len(named)
    assert client.calls == []


def test_a_trainer_without_a_source_is_rejected(memory: HostMemory) -> None:
    with pytest.raises(ValueError, match="inflight_ipc needs a WeightSource"):
        IpcTrainer.trainer_init(IpcTrainerInitInfo(rank=0), client=Five(worker(memory)))


class WithManifest(Five):
    """A client that takes a manifest, and may reject deltas."""

    rejects: InflightError | None = None
    served: str | None = None
    """Rejects the next delta from another version than this one."""

    def start_weight_update(self, manifest: Any = None) -> None:
        super().start_weight_update()
        self.manifest = manifest or {}
        if "base" in self.manifest and self.rejects is not None:
            raise self.rejects
        if self.manifest.get("base") == self.served:
            self.served = None
        if "base" in self.manifest and self.served is not None:
            raise BaseMismatch("it serves another version", served=self.served)
        self.engine.model.loaded = {}


class Lender(IpcTrainer):
    """A trainer whose host memory is known as soon as it is lent."""

    process: str | None = None
    """Whose memory it says that this is; None: as it is, of this process."""

    def _lendable(self, chunk: Any) -> Any:
        assert isinstance(self._memory, HostMemory)
        self._memory.show(dict(chunk))
        info, held = super()._lendable(chunk)
        if self.process is not None:
            info["exports"]["process"] = self.process
        return info, held


def delta_lender(source: Source, client: Four, memory: HostMemory) -> Lender:
    info = IpcTrainerInitInfo(rank=0, delta="always", chunk_bytes=1000)
    return Lender(info, client=client, source=source, memory=memory)


def specs_of(named: Tensors) -> dict[str, str]:
    found = zip(named, ops.digest(list(named.values())), strict=True)
    return {name: digest.hex() for name, digest in found}


def announced(client: WithManifest) -> dict[str, str]:
    return {spec["name"]: spec["digest"] for spec in client.manifest["tensors"]}


def test_a_delta_is_lent_and_has_only_what_changed(
    memory: HostMemory, named: Tensors
) -> None:
    client = WithManifest(worker(memory))
    before = {name: tensor.clone() for name, tensor in named.items()}
    lender = delta_lender(Source(named), client, memory)
    lender.send_weights()
    loaded = client.engine.model.loaded
    assert digests(loaded.items()) == digests(named.items())
    assert announced(client) == specs_of(named)

    name = max(named, key=lambda one: named[one].nbytes)
    named[name].view(-1).view(torch.uint8)[:2] ^= 1
    lender.send_weights()
    arriving = ArrivingParts()
    arrived = client.engine.model.loaded.items()
    parts = [part for pair in arrived for part in arriving.add(*pair)]
    arriving.require_all()
    for part in parts:
        part.check([named[name].numel()], [named[name].element_size()])
    changes = [change for part in parts for change in decode(part)]
    for change in changes:
        apply(change, before[name].view(-1))
    assert {change.number for change in changes} == {0}
    assert announced(client) == {name: specs_of(named)[name]}
    assert digests(before.items()) == digests(named.items())
    assert lender.deltas is not None and lender.deltas.last is not None
    assert lender.deltas.last.is_delta


def test_no_memory_that_a_trainer_has_is_unmapped_while_it_sends_deltas(
    memory: HostMemory, named: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A trainer keeps its last deltas, so each of them lies elsewhere.
    client = WithManifest(worker(memory))
    lender = delta_lender(Source(named), client, memory)
    lender.process = "another process"
    unmapped: list[int] = []
    monkeypatch.setattr(memory, "unmap", unmapped.append)
    name = max(named, key=lambda one: named[one].nbytes)
    for _ in range(4):
        lender.send_weights()
        client.engine._mappings.end_update()
        named[name].view(-1).view(torch.uint8)[0] += 1
    assert memory.num_maps > 3
    assert unmapped == []


@pytest.mark.parametrize("every", [0, 2])
def test_a_kept_version_that_has_changed_is_found_and_replaced(
    memory: HostMemory, named: Tensors, every: int
) -> None:
    client = WithManifest(worker(memory))
    info = IpcTrainerInitInfo(
        rank=0, delta="always", chunk_bytes=1000, delta_scrub_every=every
    )
    lender = Lender(info, client=client, source=Source(named), memory=memory)
    assert lender.deltas is not None
    *_, name = named
    is_delta = []
    for number in range(4):
        named[name].view(-1).view(torch.uint8)[0] += 1
        if number == 2:
            kept = next(iter(lender.deltas._tensors.values()))
            kept.view(-1).view(torch.uint8)[0] ^= 1
            # It is as in the kept version, so no search would find it.
            next(iter(named.values())).view(-1).view(torch.uint8)[0] ^= 1
        lender.send_weights()
        assert lender.deltas.last is not None
        is_delta.append(lender.deltas.last.is_delta)
    assert is_delta == [False, True, True, every == 0]


@pytest.mark.parametrize("kind", [BaseMismatch, DeltaUnsupported])
def test_a_rejected_delta_is_followed_by_the_whole_version(
    memory: HostMemory, named: Tensors, kind: type[InflightError]
) -> None:
    client = WithManifest(worker(memory))
    source = Source(named)
    lender = delta_lender(source, client, memory)
    lender.send_weights()
    for number in range(1, 5):
        client.rejects = kind("no delta")
        next(iter(named.values())).view(-1).view(torch.uint8)[0] += 1
        client.calls.clear()
        source.num_gathered = 0
        lender.send_weights()
        # The source was read once, and what was sent is what it had.
        assert source.num_gathered == len(named)
        loaded = client.engine.model.loaded
        assert digests(loaded.items()) == digests(named.items())
        is_tried = kind is BaseMismatch or number <= MOST_UNSUPPORTED
        assert client.calls.count("start") == 1 + is_tried
        if not is_tried:
            return
        client.rejects = None
    assert kind is BaseMismatch
    lender.send_weights()
    assert "base" in client.manifest


def test_an_engine_with_an_older_version_is_lent_what_has_changed_since(
    memory: HostMemory, named: Tensors
) -> None:
    client = WithManifest(worker(memory))
    lender = delta_lender(Source(named), client, memory)
    digests_sent = []
    *changed, last = [name for name, tensor in named.items() if tensor.numel()]

    def sent() -> list[str]:
        """One update; what each start of it announced."""
        starts = client.calls.count("start")
        lender.send_weights()
        assert lender.deltas is not None and isinstance(lender.deltas, DeltaUpdates)
        assert lender.deltas._base is not None
        digests_sent.append(lender.deltas._base.digest)
        assert client.calls.count("start") > starts
        return list(announced(client))

    sent()
    for name in (changed := changed[:3]):
        named[name].view(-1).view(torch.uint8)[0] += 1
        assert sent() == [name]
    # The next start is rejected; the one after it has another base.
    client.served = digests_sent[1]
    named[last].view(-1).view(torch.uint8)[0] += 1
    assert set(sent()) == {*changed[1:], last}
    assert client.manifest["base"] == digests_sent[1]
    assert announced(client).items() <= specs_of(named).items()
    assert lender.deltas is not None and lender.deltas.last is not None
    assert lender.deltas.last.is_delta
    client.served = "0" * 32
    named[last].view(-1).view(torch.uint8)[0] += 1
    assert sent() == list(named) and "base" not in client.manifest
