"""Ranks of a trainer that look for changes in their own shards, and send deltas.

As a script: python -m tests.support.trainers.sharded_deltas FOLDER SIZE; rank 0 writes
what became of each update into a file of the folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing import start_processes

from tests.support.deltas import integers, random_bits, stepped
from tests.support.models.seeing import SEEING
from tests.support.models.tiny import common_fields, make_tokenizer
from tests.support.transports.host_memory import HostMemory
from tests.support.transports.lent_to import receive, worker
from vllm.inflight import ops
from vllm.inflight.delta.decode import apply, decode
from vllm.inflight.delta.encode import Encoder
from vllm.inflight.delta.parts import ArrivingParts
from vllm.inflight.errors import (
    BaseMismatch,
    ConfigError,
    DeltaUnsupported,
    InflightError,
    TransferFault,
    UpdateBusy,
)
from vllm.inflight.trainer.deltas import batches, shard_search
from vllm.inflight.trainer.deltas.batches import WHOLE_FROM
from vllm.inflight.trainer.deltas.policy import DeltaPolicy
from vllm.inflight.trainer.deltas.published import version_digest
from vllm.inflight.trainer.deltas.ranks import TrainerRanks
from vllm.inflight.trainer.deltas.shard_updates import ShardUpdates
from vllm.inflight.transport.collective.trainer_engine import spec_of
from vllm.inflight.transport.cuda_ipc.trainer_engine import (
    IpcTrainer,
    IpcTrainerInitInfo,
)
from vllm.inflight.transport.weight_source import Weights
from vllm.inflight.update import Manifest, TensorSpec

PATIENCE = timedelta(seconds=60)
Tensors = dict[str, torch.Tensor]


class Engine:
    """What an engine makes of updates: it proves them, or changes nothing."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.specs: dict[str, TensorSpec] = {}
        self.fails: InflightError | None = None
        """What the next update is answered by, after it has come."""
        self.manifests: list[Manifest] = []

    @property
    def digest(self) -> str:
        return version_digest(self.specs)

    def start_weight_update(self, manifest: Any = None) -> None:
        """Never called; it says that this client takes manifests."""

    def transfer(
        self, manifest: Manifest, pairs: Iterable[tuple[str, torch.Tensor]]
    ) -> str:
        manifest = Manifest.parse(manifest.to_dict())
        self.manifests.append(manifest)
        if manifest.base not in (None, self.digest):
            raise BaseMismatch("it serves another version", served=self.digest)
        came = {name: tensor.clone() for name, tensor in pairs}
        new = came
        if manifest.base is not None:
            new = {name: self.tensors[name].clone() for name in manifest.tensors}
            names, arriving = list(new), ArrivingParts()
            parts = [part for pair in came.items() for part in arriving.add(*pair)]
            for part in parts:
                counts = [new[name].numel() for name in names]
                part.check(counts, [new[name].element_size() for name in names])
                for changes in decode(part):
                    apply(changes, new[names[changes.number]].view(-1))
        digests = ops.digest(list(new.values()))
        found = {n: d.hex() for n, d in zip(new, digests, strict=True)}
        assert found == {name: spec.digest for name, spec in manifest.tensors.items()}
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        if manifest.base is None:
            self.tensors, self.specs = {}, {}
        self.tensors |= new
        self.specs |= manifest.tensors
        return self.digest


class Net(nn.Module):
    """Matrices of sizes that no number of ranks divides, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, 104)
        self.up = nn.Linear(104, 203)
        self.down = nn.Linear(203, 104, bias=False)
        self.norm = nn.RMSNorm(3)
        self.register_buffer("scale", torch.tensor(0.5))


def net() -> Net:
    torch.manual_seed(0)
    return Net().bfloat16()


def fsdp(size: int) -> nn.Module:
    """Cut along dimension 0; some ranks have nothing of some tensors."""
    model = net()
    fully_shard(model.up)
    return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))


def columns(size: int) -> Tensors:
    """Cut along either dimension, or whole on each rank."""
    mesh = init_device_mesh("cpu", (size,))
    cuts = {"up.weight": Shard(0), "down.weight": Shard(1), "embed.weight": Shard(1)}
    return {
        name: distribute_tensor(tensor, mesh, [cuts.get(name, Replicate())])
        for name, tensor in net().state_dict().items()
    }


def both(size: int) -> nn.Module:
    """FSDP2 over tensor parallelism."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(net(), mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def copies(size: int) -> nn.Module:
    """Shards that several ranks have."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copy", "shard"))
    return fully_shard(net(), mesh=mesh)


WAYS: dict[str, Callable[[int], nn.Module | Tensors]] = {
    "fsdp": fsdp,
    "columns": columns,
    "both": both,
    "copies": copies,
}


def entries(model: nn.Module | Tensors) -> Tensors:
    if isinstance(model, nn.Module):
        return {n: t.detach() for n, t in model.state_dict(keep_vars=True).items()}
    return model


def write(model: nn.Module | Tensors, new: Tensors) -> None:
    """Give every rank its share of these tensors."""
    for name, tensor in entries(model).items():
        if isinstance(tensor, DTensor):
            mesh: DeviceMesh = tensor.device_mesh
            # Cut one mesh dimension at a time: the last cuts first where FSDP2 came
            # after tensor parallelism.
            local = cut(new[name], tensor, mesh)
            tensor.to_local().copy_(local)
        else:
            tensor.copy_(new[name])


def cut(whole: torch.Tensor, like: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's share of a tensor, by torch's own redistribution."""
    order = sorted(
        range(mesh.ndim), key=lambda n: hasattr(like.placements[n], "split_factor")
    )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim in order:
        placement = like.placements[dim]
        if hasattr(placement, "dim"):
            some = whole.chunk(mesh.size(dim), placement.dim)
            at = coordinate[dim]
            whole = some[at] if at < len(some) else whole.narrow(placement.dim, 0, 0)
    return whole


class Client:
    """Upstream's calls, for what a trainer lends from this process."""

    def __init__(self, engine: Engine, memory: HostMemory) -> None:
        self._engine, self._worker = engine, worker(memory)
        self.committed: dict[str, Any] = {}

    def start_weight_update(self, manifest: Any = None) -> None:
        self._manifest = Manifest.parse(manifest)
        self._worker.model.loaded = {}

    def update_weights(self, update_info: Any) -> None:
        receive(self._worker, update_info)

    def finish_weight_update(self) -> None:
        came = self._worker.model.loaded.items()
        self.committed = {"digest": self._engine.transfer(self._manifest, came)}

    def abort_weight_update(self) -> None:
        """Nothing is kept of an update that has failed."""


class Lender(IpcTrainer):
    """A trainer whose host memory is known as soon as it is lent."""

    def _lendable(self, chunk: Any) -> Any:
        assert isinstance(self._memory, HostMemory)
        self._memory.show(dict(chunk))
        return super()._lendable(chunk)


def chain(
    rank: int, make: Callable[[int], Any], size: int, *, is_lent: bool = False
) -> list[Any]:
    """Updates one after the other; on rank 0, what became of each."""
    model = make(size)
    engine = Engine()
    source = Weights(model)
    updates: Any
    if is_lent:
        memory = HostMemory()
        client: Any = Client(engine, memory)
        info = IpcTrainerInitInfo(
            rank=rank,
            delta="auto",
            delta_shards=True,
            delta_whole_from=WHOLE_FROM,  # as over the other wires of this test
            chunk_bytes=1 << 16,
        )
        lender = Lender(info, client=client, source=source, memory=memory)
        updates = lender.deltas
    else:
        policy = DeltaPolicy("auto", "device", engine if rank == 0 else None)
        cpu = torch.device("cpu")
        updates = ShardUpdates(TrainerRanks(rank), policy, cpu, is_pinned=False)
    seen: list[Any] = []
    truth = {n: t.clone() for n, t in net().state_dict().items()}

    def send(what: str, new: Tensors, fails: InflightError | None = None) -> None:
        truth.update(new)
        write(model, truth)
        # As torch itself puts the shards together.
        for name, tensor in entries(model).items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, truth[name]), name
        engine.fails, engine.manifests = fails, []
        error = ""
        try:
            if is_lent:
                lender.send_weights()
            elif updates.are_wanted(is_subset=False):
                facts = [spec_of(fact) for fact in source.read_facts()]
                updates.send(source, facts, source.read_tensors, engine.transfer)
        except InflightError as raised:
            error = raised.code
        if rank:
            return
        served = all(torch.equal(engine.tensors[n], t) for n, t in truth.items())
        sent = updates.last
        assert sent is not None
        row: dict[str, Any] = {"what": what, "served": served, "error": error}
        row["tries"] = [m.base is not None for m in engine.manifests]
        row |= {"bytes": sent.num_bytes, "gathered": sent.gathered_bytes}
        seen.append(row)

    send("first", {})
    for seed, share in enumerate((0.01, 0.02, 0.08)):
        send(f"{share}", stepped(truth, seed, share))
    send("nothing", {})
    send("one element", {"norm.weight": truth["norm.weight"] * -1})
    send("busy", stepped(truth, 5), UpdateBusy("another update"))
    send("after busy", {})
    send("lost", stepped(truth, 11), TransferFault("the group has ended"))
    send("rejected", stepped(truth, 6), DeltaUnsupported("no"))
    send("after that", stepped(truth, 7))
    engine.specs.pop("scale", None)
    send("mismatch", stepped(truth, 8))
    send("after mismatch", stepped(truth, 9))
    send("all", {n: t + t.abs().max() for n, t in truth.items()})
    send("after all", stepped(truth, 10))
    send("all, busy", {n: t * 3 for n, t in truth.items()}, UpdateBusy("another"))
    send("after that busy", stepped(truth, 12))
    send("at last", stepped(truth, 13))
    older: list[tuple[Tensors, dict[str, TensorSpec]]] = []
    for number in range(6):
        older.append((engine.tensors.copy(), engine.specs.copy()))
        send(f"next {number}", stepped(truth, 20 + number, 0.005))
    engine.tensors, engine.specs = older[4]
    send("two missed", stepped(truth, 30))
    send("after two missed", stepped(truth, 31))
    engine.tensors, engine.specs = older[0]
    send("too many missed", stepped(truth, 32))
    whole = sum(prod(t.shape) * t.element_size() for t in truth.values())
    seen.append({"what": "size", "bytes": whole})
    return seen


def renamed(rank: int, size: int) -> list[Any]:
    """Two updates of a model whose checkpoint has other names: what became of each."""
    seeing = SEEING["llava"]
    tokenizer = make_tokenizer(seeing.named)
    tokenizer.add_tokens([*seeing.tokens.values()], special_tokens=True)
    torch.manual_seed(0)
    model = seeing.make(tokenizer, **common_fields(tokenizer)).bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    engine, source = Engine(), Weights(model)
    policy = DeltaPolicy("auto", "device", engine if rank == 0 else None)
    cpu = torch.device("cpu")
    updates = ShardUpdates(TrainerRanks(rank), policy, cpu, is_pinned=False)
    seen = []
    for _ in range(2):
        assert updates.are_wanted(is_subset=False)
        facts = [spec_of(fact) for fact in source.read_facts()]
        updates.send(source, facts, source.read_tensors, engine.transfer)
        # As they are gathered, converted and sent without a search.
        whole = {name: tensor.clone() for name, tensor in source.read_tensors()}
        if rank == 0:
            served = all(torch.equal(engine.tensors[n], t) for n, t in whole.items())
            is_delta = engine.manifests[-1].base is not None
            names = engine.tensors.keys() - dict(model.named_parameters()).keys()
            seen.append([served, is_delta, len(names)])
        for parameter in model.parameters():
            local = parameter.detach().to_local()
            local.view(-1).view(torch.int16)[::50] += 1
    return seen


def hot(rank: int, size: int) -> list[Any]:
    """Updates in which some shards change much: whether each was a delta, and how much
    of the weights rank 0 has compared."""
    shard_search.LOOKED_AT_BYTES = 0
    mesh = init_device_mesh("cpu", (size,))
    truth = {f"{n}": random_bits(torch.bfloat16, 1 << 18, n) for n in range(9)}
    model: Tensors = {
        name: distribute_tensor(tensor.view(1 << 9, -1), mesh, [Shard(0)])
        for name, tensor in truth.items()
    }
    engine, source = Engine(), Weights(model)
    policy = DeltaPolicy("auto", "device", engine if rank == 0 else None)
    cpu = torch.device("cpu")
    updates = ShardUpdates(TrainerRanks(rank), policy, cpu, is_pinned=False)
    seen: list[Any] = []
    compared = []
    search = Encoder.search

    def noted(self: Encoder, pairs: Any) -> Any:
        compared.extend(now.nbytes for _, now in pairs)
        return search(self, pairs)

    def send(changes: Callable[[str], bool]) -> None:
        for name, tensor in model.items():
            local = tensor.to_local().view(-1).view(torch.int16)  # type: ignore[attr-defined]
            local[::200] += 1
            if changes(name):
                local[torch.arange(len(local)) % 5 < 3] += 1
        compared.clear()
        assert updates.are_wanted(is_subset=False)
        facts = [spec_of(fact) for fact in source.read_facts()]
        updates.send(source, facts, source.read_tensors, engine.transfer)
        own = sum(t.to_local().nbytes for t in model.values())  # type: ignore[attr-defined]
        whole = {name: tensor.clone() for name, tensor in source.read_tensors()}
        if rank == 0:
            assert engine.tensors.keys() == whole.keys()
            for name, tensor in whole.items():
                assert torch.equal(*map(integers, (engine.tensors[name], tensor))), name
            is_delta = engine.manifests[-1].base is not None
            seen.append([is_delta, sum(compared) / own])

    Encoder.search = noted  # type: ignore[method-assign]
    try:
        send(lambda name: False)
        send(lambda name: name == "0")
        send(lambda name: name == "8")
        send(lambda name: rank == size - 1)
        send(lambda name: True)
        send(lambda name: False)
    finally:
        Encoder.search = search  # type: ignore[method-assign]
        shard_search.LOOKED_AT_BYTES = batches.LOOKED_AT_BYTES
    return seen


class Whole:
    """A source that cannot tell its shards."""


def refused(rank: int) -> list[str]:
    """What each rank raises where rank 1 alone has no shards."""
    policy = DeltaPolicy("auto", "device", None)
    cpu = torch.device("cpu")
    updates = ShardUpdates(TrainerRanks(rank), policy, cpu, is_pinned=False)
    source: Any = Weights(net()) if rank == 0 else Whole()
    assert updates.are_wanted(is_subset=False)
    try:
        updates.send(source, [], list, Engine().transfer)
    except ConfigError as error:
        mine = error.message
    found: list[Any] = [None] * 2
    dist.all_gather_object(found, mine)
    return found


def main(rank: int, folder: str, size: int) -> None:
    """What one rank does."""
    place = {"rank": rank, "world_size": size, "timeout": PATIENCE}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **place)
    torch.set_num_threads(1)
    found = {}
    for way, make in WAYS.items():
        if way in ("fsdp", "columns") or size == 4:
            found[way] = chain(rank, make, size)
    found["lent"] = chain(rank, fsdp, size, is_lent=True)
    found["hot"] = hot(rank, size)
    if size == 2:
        found["renamed"] = renamed(rank, size)
        found["without shards"] = refused(rank)
    if rank == 0:
        Path(folder, "seen.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    size = int(sys.argv[2])
    start_processes(main, (sys.argv[1], size), nprocs=size, start_method="fork")
