"""The delta of one publish, and the version that it starts from."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.deltas import integers, random_bits
from vllm.inflight.trainer.deltas import delta as trainer_delta
from vllm.inflight.trainer.deltas.delta import Delta, DeltaSearch
from vllm.inflight.trainer.deltas.published import PublishedVersion
from vllm.inflight.trainer.deltas.updates import DeltaUpdates
from vllm.inflight.trainer.snapshot import DTYPES, Snapshot
from vllm.inflight.transport import (
    GlooTrainerInitInfo,
    IpcTrainerInitInfo,
    NcclTrainerInitInfo,
)
from vllm.inflight.update import Manifest

Weights = dict[str, torch.Tensor]
SIZES = (1, 7, 4096, 70_001)


def weights(seed: int = 0) -> Weights:
    """Tensors of every dtype and of odd sizes, a scalar and an empty one among them."""
    made = {
        f"{str(dtype).removeprefix('torch.')}.{size}": random_bits(dtype, size, seed)
        for dtype in DTYPES
        for size in SIZES
    }
    made["scalar"] = random_bits(torch.float32, 1, seed).view(())
    made["matrix"] = random_bits(torch.bfloat16, 48 * 32, seed).view(48, 32)
    made["empty"] = torch.zeros(0, 4)
    return made


def published(tensors: Weights) -> PublishedVersion:
    snapshot = Snapshot.pack(tensors.items())
    base = PublishedVersion.of_file(snapshot, snapshot.manifest())
    snapshot.remove()  # the memory stays
    return base


def same(found: Iterator[tuple[str, torch.Tensor]] | Any, expected: Weights) -> bool:
    named = dict(found)
    return named.keys() == expected.keys() and all(
        named[n].shape == t.shape and torch.equal(integers(named[n]), integers(t))
        for n, t in expected.items()
    )


def moved(tensors: Weights, names: list[str]) -> Weights:
    """The weights with one element of these tensors changed."""
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in names:
        integers(new[name]).view(-1)[-1] ^= 1
    return new


@pytest.fixture(params=["all tensors", "one", "none"])
def step(request: pytest.FixtureRequest) -> tuple[Weights, Weights]:
    old = weights()
    names = [name for name, tensor in old.items() if tensor.numel()]
    chosen = {"all tensors": names, "one": ["matrix"], "none": []}[request.param]
    return old, moved(old, chosen)


def test_a_delta_leads_from_one_version_to_the_next(step):
    old, new = step
    base = published(old)
    assert same(((name, base.tensor(name)) for name in old), old)
    found = DeltaSearch(base, "always").run(new.items(), None)
    assert isinstance(found, Delta)
    assert same(found.whole(), new)
    assert same(((name, base.tensor(name)) for name in old), old), (
        "the base was written"
    )
    advanced = found.commit()
    assert same(((name, advanced.tensor(name)) for name in old), new)
    assert advanced.digest == published(new).digest


def test_a_search_that_gives_up_has_all_tensors_as_they_are_now():
    old = {f"w{n}": random_bits(torch.bfloat16, 9 << 20, n) for n in range(3)}
    new = dict(old)
    new["w0"] = moved(old, ["w0"])["w0"]
    for name in ("w1", "w2"):
        new[name] = random_bits(torch.bfloat16, 9 << 20, 9)
    found = DeltaSearch(published(old), "auto").run(new.items(), None)
    assert isinstance(found, Snapshot)
    assert same(((n, published_of(found).tensor(n)) for n in new), new)
    found.remove()


@pytest.mark.parametrize("wire", ["gloo", "nccl", "ipc"])
def test_where_whole_versions_are_fast_they_are_sent_from_a_smaller_share_on(wire):
    group = {"rank": 0, "master_address": "", "master_port": 0, "world_size": 2}
    infos = {
        "gloo": lambda: GlooTrainerInitInfo(**group),
        "nccl": lambda: NcclTrainerInitInfo(**group),
        "ipc": lambda: IpcTrainerInitInfo(rank=0),
    }
    old = {"w": torch.zeros(9 << 20, dtype=torch.bfloat16)}
    new = {"w": old["w"].clone()}
    new["w"][::10] = 1.0
    search = DeltaSearch(published(old), "auto", infos[wire]().delta_whole_from)
    found = search.run(new.items(), None)
    # A tenth of the elements takes about a tenth of the bytes.
    assert isinstance(found, Delta) == (wire == "gloo")
    if isinstance(found, Snapshot):
        found.remove()


def published_of(snapshot: Snapshot) -> PublishedVersion:
    return PublishedVersion.of_file(snapshot, snapshot.manifest())


@pytest.mark.parametrize("change", ["a tensor more", "a tensor less", "another shape"])
def test_another_set_of_tensors_is_sent_whole(change):
    old = weights()
    new = dict(old)
    if change == "a tensor more":
        new["more"] = torch.ones(3)
    elif change == "a tensor less":
        del new["matrix"]
    else:
        new["matrix"] = new["matrix"].view(32, 48)
    found = DeltaSearch(published(old), "always").run(new.items(), None)
    assert isinstance(found, Snapshot)
    assert same(((n, published_of(found).tensor(n)) for n in new), new)
    found.remove()


@pytest.mark.parametrize("most", [0, 20_000, 1 << 30])
@pytest.mark.parametrize("is_other", [False, True], ids=["", "another shape"])
def test_a_source_may_reuse_memory_for_its_next_tensor(
    monkeypatch: pytest.MonkeyPatch, most: int, is_other: bool
) -> None:
    monkeypatch.setattr(trainer_delta, "batch_bytes", lambda device: most)
    old = {f"{n}": random_bits(torch.bfloat16, 6000, n) for n in range(9)}
    new = moved(old, list(old)[::2])
    if is_other:
        new["7"] = random_bits(torch.bfloat16, 5000, 7)
    memory = torch.empty(6000, dtype=torch.bfloat16)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new.items():
            gathered = memory[: tensor.numel()]
            gathered.copy_(tensor)
            yield name, gathered

    found = DeltaSearch(published(old), "always").find(source())
    if isinstance(found, Delta):
        assert not is_other
        assert list(found.body.changed) == list(old)[::2]
        assert same(found.whole(), new)
    else:
        assert is_other
        assert same(((name, tensor.clone()) for name, tensor in found), new)


def test_after_a_commit_that_fails_in_the_trainer_the_whole_version_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Client:
        def start_weight_update(self, manifest: Any = None) -> None:
            """Takes a manifest, as deltas need it."""

    def transfer(manifest: Manifest, pairs: list[Any]) -> None:
        sent.append(manifest.base)

    def half(self: PublishedVersion, parts: Any, specs: Any) -> None:
        self.tensor("matrix").zero_()
        raise MemoryError("no room for the changes")

    sent: list[str | None] = []
    updates = DeltaUpdates(Client(), "always", "host", torch.device("cpu"), transfer)
    made = [weights()]
    for _ in range(4):
        made.append(moved(made[-1], ["matrix"]))
    updates.send(made[0].items())
    updates.send(made[1].items())
    assert updates.last is not None and updates.last.is_delta
    with monkeypatch.context() as patch:
        patch.setattr(PublishedVersion, "advance", half)
        with pytest.raises(MemoryError):
            updates.send(made[2].items())
    for new, is_delta in ((made[3], False), (made[4], True)):
        updates.send(new.items())
        assert updates.last.is_delta == is_delta
    assert [base is not None for base in sent] == [False, True, True, False, True]
