"""A trainer's deltas by the kernels for a GPU; Triton's interpreter runs them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support.deltas import (
    integers,
    parts_of,
    random_bits,
    scattered,
    with_changes,
)
from tests.support.triton_interpreter import succeeds
from vllm.inflight.delta import Encoder, Part, application, encode
from vllm.inflight.delta.decode import decode
from vllm.inflight.delta.decoded import DecodedPart
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.delta.encode import Search
from vllm.inflight.errors import Malformed
from vllm.inflight.ops.gpu_digest import GpuDigest
from vllm.inflight.trainer.deltas import delta as trainer_delta
from vllm.inflight.trainer.deltas import published, shard_search
from vllm.inflight.trainer.deltas.delta import Delta, DeltaSearch
from vllm.inflight.trainer.deltas.published import Digests, PublishedVersion, digests_of
from vllm.inflight.trainer.deltas.shard_search import ShardReport, ShardSearch
from vllm.inflight.trainer.snapshot import DTYPES
from vllm.inflight.trainer.sources.shards import Box, OwnShard
from vllm.inflight.update import TensorSpec

pytest.importorskip("triton", reason="Triton is not installed")

Weights = dict[str, torch.Tensor]
CPU = torch.device("cpu")
SIZES = (2_001, 129)


@contextmanager
def on_device(most: int) -> Iterator[None]:
    """Tensors of the host take the way of those on a GPU; a batch has `most` bytes."""
    from vllm.inflight.delta.device_encode import Compared, DeviceCoder, DeviceSearch

    class OnDevice(Digests):
        def add(self, pairs) -> None:
            self._on_device.setdefault(CPU, GpuDigest(CPU, {})).add(pairs)

    def search(self: Encoder, pairs) -> Search:
        flat = [encode._pair(*pair) for pair in pairs]
        if not flat:
            return Search(flat, None)
        compared = [Compared(0, 0, *pair) for pair in flat]
        return Search(flat, DeviceSearch(compared, self._limit))

    def coder(limit: int, values: int, num_threads: int) -> DeviceCoder:
        return DeviceCoder(limit, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_HostCoder", coder)
        patch.setattr(Encoder, "search", search)
        patch.setattr(trainer_delta, "Digests", OnDevice)
        patch.setattr(published, "apply_all", application.apply_on_device)
        for module in (trainer_delta, shard_search):
            patch.setattr(module, "batch_bytes", lambda device: most)
        yield


def weights() -> Weights:
    """Tensors of every dtype; neighbours have other ones."""
    return {
        f"{number}.{dtype}": random_bits(dtype, size, number)
        for number, size in enumerate(SIZES)
        for dtype in DTYPES
    }


def stepped(old: Weights, seed: int) -> Weights:
    """Some elements of most tensors have changed, and none of the others."""
    new = {}
    for number, (name, tensor) in enumerate(old.items()):
        share = (0.02, 0.3, 0)[(number + seed) % 3]
        places = scattered(tensor.numel(), share, seed)
        new[name] = with_changes(tensor, places, most=3 if number % 2 else 0)
    return new


def kept(tensors: Weights) -> PublishedVersion:
    """These tensors as the version that a trainer keeps, in memory of its own."""
    specs = {
        name: TensorSpec(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            digest.hex(),
        )
        for (name, tensor), digest in zip(
            tensors.items(), digests_of(list(tensors.items())), strict=True
        )
    }
    return PublishedVersion({name: t.clone() for name, t in tensors.items()}, specs)


def found_in(base: PublishedVersion, new: Weights) -> Delta:
    memory = torch.empty(max(tensor.nbytes for tensor in new.values()) + 16)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new.items():
            here = memory.view(torch.uint8)[: tensor.nbytes].view(tensor.dtype)
            yield name, here.copy_(tensor)  # it is overwritten by the next one

    found = DeltaSearch(base, "always").find(source())
    assert isinstance(found, Delta)
    return found


def same_parts(one: list[Part], other: list[Part]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.table, b.table) and torch.equal(a.data, b.data)
        for a, b in zip(one, other, strict=True)
    )


def has_bits(version: PublishedVersion, expected: Weights) -> bool:
    return all(
        torch.equal(integers(tensor), integers(expected[name]))
        for name, tensor in version.pairs()
    )


def chain() -> None:
    """Versions that are found and kept, one after another."""
    old = weights()
    on_host, versions = kept(old), [kept(old), kept(old)]
    for seed in range(2):
        new = stepped(old, seed)
        wanted = found_in(on_host, new)
        for version, most in zip(versions, (20_000, 1 << 30), strict=True):
            with on_device(most):
                found = found_in(version, new)
                assert list(found.body.changed.items()) == list(
                    wanted.body.changed.items()
                )
                assert same_parts(found.body.parts, wanted.body.parts)
                assert found.commit() is version
            assert has_bits(version, new)
        on_host = wanted.commit()
        assert {version.digest for version in versions} == {on_host.digest}
        old = new
    with on_device(1 << 30):  # nothing has changed
        assert found_in(versions[0], old).commit().digest == on_host.digest
    assert has_bits(versions[0], old)


def shards() -> None:
    """A rank's shards, in one batch and in many."""
    old, box = weights(), Box.of_all
    names = list(old)
    searches = [ShardSearch(CPU) for _ in range(3)]

    def find(search: ShardSearch, tensors: Weights) -> ShardReport:
        own = [OwnShard(n, t, box(tuple(t.shape))) for n, t in tensors.items()]
        report = search.find(own)
        parts = search.parts
        search.keep(own, report, is_all=report.boxes is not None)
        search.parts = parts
        return report

    for search in searches:
        find(search, {name: tensor.clone() for name, tensor in old.items()})
    for seed in range(2):
        old = stepped(old, seed)
        wanted = find(searches[0], old)
        assert wanted.changed and len(wanted.changed) < len(names)
        for search, most in zip(searches[1:], (20_000, 1 << 30), strict=True):
            with on_device(most):
                assert find(search, old) == wanted
            assert same_parts(search.parts, searches[0].parts)


def part_of(tensors: list[torch.Tensor]) -> tuple[Part, list[torch.Tensor]]:
    """A part that changes these tensors, and what it leads to."""
    new = [with_changes(t, scattered(t.numel(), 0.1), most=3) for t in tensors]
    (part,) = parts_of(list(zip(tensors, new, strict=True)))
    part.check([t.numel() for t in tensors], [t.itemsize for t in tensors])
    return part, new


def launched() -> None:
    """The launches of a part do not grow with its tensors."""
    from vllm.inflight.delta import triton_kernels as kernels

    counts = []
    for num in (3, 40):
        old = [random_bits(torch.bfloat16, 2_000, seed) for seed in range(num)]
        part, new = part_of(old)
        ran: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("decode_gaps", "decode_others", "decode_runs", "apply"):
                patch.setattr(kernels, name, noting(getattr(kernels, name), ran))
            application.apply_on_device([part], old)
        for tensor, other in zip(old, new, strict=True):
            assert torch.equal(integers(tensor), integers(other))
        counts.append(sorted(ran))
    assert counts == [["apply", "decode_gaps"]] * 2, counts


def noting(real: Callable[..., None], ran: list[str]) -> Callable[..., None]:
    """A kernel that notes when it is launched."""

    def run(*args, **options) -> None:
        ran.append(real.__name__)
        real(*args, **options)

    return run


def beyond() -> None:
    """A place that is none of the tensor is not written."""
    memory = random_bits(torch.int16, 3_000)
    before = memory.clone()
    tensor = memory[1_000:2_000]
    part, _ = part_of([tensor])
    changes = decode(part)
    num = len(changes.places) // 4
    changes.places[:num] -= 1_500
    changes.places[-num:] += 1_500
    launches = Launches(CPU)
    target = [[tensor.data_ptr(), tensor.numel(), tensor.itemsize]]
    application._add(changes, torch.tensor(target).numpy(), launches)
    launches.run()
    assert not torch.equal(tensor, before[1_000:2_000])
    assert torch.equal(memory[:1_000], before[:1_000])
    assert torch.equal(memory[2_000:], before[2_000:])


def refused() -> None:
    """Damaged data is told, and what does not fit the part."""
    old = [random_bits(torch.bfloat16, 3_000), random_bits(torch.float32, 3_000)]
    part, _ = part_of(old)
    for wrong, why in (
        (old[::-1], "width"),
        ([old[0].view(60, 50).t(), old[1]], "contiguous"),
        ([old[0].to("meta"), old[1]], "device"),
    ):
        with pytest.raises(ValueError, match=why):
            application.apply_on_device([part], wrong)
    part.data[: part.data.numel() // 2] = 255
    with pytest.raises(Malformed, match="row 0: "):
        application.apply_on_device([part], old)


def held() -> None:
    """What the tables refer to lives until the kernels have run, and no longer: there
    is never room for two parts."""
    memory: list[weakref.ref[torch.Tensor]] = []
    add, run, decode = application._add, Launches.run, application.decode_unproved

    def decoded(part: Part, launches: Launches) -> DecodedPart:
        assert all(each() is None for each in memory)
        return decode(part, launches=launches)

    def noted(changes, targets, launches) -> None:
        memory.extend(map(weakref.ref, (changes.places, changes.bits)))
        add(changes, targets, launches)

    def run_all(launches: Launches) -> None:
        gc.collect()
        assert all(each() is not None for each in memory[-2:])
        run(launches)
        assert not launches.held

    old = [random_bits(torch.bfloat16, 3_000)]
    part, _ = part_of(old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(application, "decode_unproved", decoded)
        patch.setattr(application, "_add", noted)
        patch.setattr(Launches, "run", run_all)
        application.apply_on_device([part, part], old)
    gc.collect()
    assert len(memory) == 4 and all(each() is None for each in memory)


def applied() -> None:
    """All that holds for one delta."""
    for check in (launched, beyond, refused, held):
        check()


@pytest.mark.seconds
@pytest.mark.parametrize("what", ["chain", "shards"])
def test_a_gpu_finds_and_keeps_what_the_host_does(what: str) -> None:
    succeeds(f"{__name__}:{what}")


@pytest.mark.seconds
def test_a_delta_is_applied_in_a_few_launches_a_part() -> None:
    succeeds(f"{__name__}:applied")
