"""The codec of deltas on a real GPU: the bytes of the host, both ways."""

from itertools import pairwise

import pytest
import torch

from tests.support.deltas import (
    DTYPES,
    integers,
    parts_of,
    random_bits,
    scattered,
    with_changes,
)
from vllm.inflight import delta, ops
from vllm.inflight.errors import Malformed
from vllm.inflight.trainer.deltas import batches
from vllm.inflight.trainer.deltas.delta import DeltaSearch
from vllm.inflight.trainer.deltas.published import PublishedVersion
from vllm.inflight.update import TensorSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZE = 5_000_003


def pairs_of(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    old = random_bits(dtype, SIZE)
    most = 0 if dtype is torch.bool else 200
    changes = [scattered(SIZE, share) for share in (0.0003, 0.01, 0.4)]
    rows = torch.cat([torch.arange(4096) + 50_001 * row for row in range(9)])
    changes += [torch.arange(0), torch.arange(SIZE), torch.tensor([SIZE - 1]), rows]
    return [(old, with_changes(old, places, most=most)) for places in changes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", ["auto", "raw", "difference"])
def test_a_gpu_writes_and_reads_the_parts_of_the_host(dtype, values):
    pairs = pairs_of(dtype)
    wanted = parts_of(pairs, values=values)
    on_gpu = [(old.cuda(), new.cuda()) for old, new in pairs]
    seen = parts_of(on_gpu, values=values)
    counts, widths = [SIZE] * len(pairs), [dtype.itemsize] * len(pairs)
    assert len(seen) == len(wanted)
    for part, other in zip(seen, wanted, strict=True):
        assert part.data.is_cuda
        assert torch.equal(part.table.cpu(), other.table)
        assert torch.equal(part.data.cpu(), other.data)
        for each in (part, other):
            each.check(counts, widths)
        for found, same in zip(delta.decode(part), delta.decode(other), strict=True):
            assert found.places.is_cuda and found.number == same.number
            assert torch.equal(found.places.cpu(), same.places)
            assert torch.equal(found.bits.cpu(), same.bits)
            assert found.are_differences == same.are_differences


def test_many_tensors_are_encoded_at_once_on_the_gpu():
    pairs = [pair for dtype in DTYPES for pair in pairs_of(dtype)]
    small = random_bits(torch.bfloat16, 129)
    for places in ([3], [3, 90], range(60), range(0, 129, 2)):
        pairs.append((small[1:], with_changes(small, places)[1:]))  # not aligned
    changed = [pair for pair in pairs if delta.changed(*pair)]
    assert len(changed) < len(pairs)
    encoder = delta.Encoder()
    on_gpu = [(old.cuda(), new.cuda()) for old, new in pairs]
    on_gpu[-1] = tuple(torch.cat((t.new_zeros(1), t))[1:] for t in on_gpu[-1])
    seen = [*encoder.add_all(0, on_gpu), *encoder.finish()]
    assert encoder.have_changed == [bool(delta.changed(*pair)) for pair in pairs]
    wanted = parts_of(changed)
    assert len(seen) == len(wanted) > 1
    sizes = [len(old) for old, _ in changed]
    widths = [old.element_size() for old, _ in changed]
    for part, other in zip(seen, wanted, strict=True):
        assert torch.equal(part.table.cpu(), other.table)
        assert torch.equal(part.data.cpu(), other.data)
        for each in (part, other):
            each.check(sizes, widths)
        for found, same in zip(delta.decode(part), delta.decode(other), strict=True):
            assert torch.equal(found.places.cpu(), same.places)
            assert torch.equal(found.bits.cpu(), same.bits)


@pytest.mark.parametrize("batch_bytes", [1 << 20, 30_000_000, 1 << 30])
def test_a_search_in_batches_finds_what_the_host_finds(monkeypatch, batch_bytes):
    dtypes = torch.bfloat16, torch.float32, torch.int8
    old = {f"w{n}": random_bits(dtypes[n % 3], SIZE, n) for n in range(12)}
    new = {
        name: with_changes(tensor, scattered(SIZE, 0.02 * (n % 4)), most=9)
        for n, (name, tensor) in enumerate(old.items())
    }
    memory = torch.empty(SIZE, dtype=torch.float32, device="cuda")

    def source():
        for name, tensor in new.items():
            here = memory.view(tensor.dtype)[:SIZE]
            yield name, here.copy_(tensor)  # it is overwritten by the next one

    specs = {
        name: TensorSpec(
            name,
            (SIZE,),
            str(tensor.dtype).removeprefix("torch."),
            ops.digest([tensor])[0].hex(),
        )
        for name, tensor in old.items()
    }
    monkeypatch.setattr(batches, "BATCH_BYTES", batch_bytes)
    kept = {name: tensor.cuda() for name, tensor in old.items()}
    on_gpu = DeltaSearch(PublishedVersion(kept, specs), "always").find(source())
    on_host = DeltaSearch(PublishedVersion(old, specs), "always").find(new.items())
    assert list(on_gpu.body.changed.items()) == list(on_host.body.changed.items())
    assert len(on_gpu.body.parts) == len(on_host.body.parts)
    for part, other in zip(on_gpu.body.parts, on_host.body.parts, strict=True):
        assert torch.equal(part.table.cpu(), other.table)
        assert torch.equal(part.data.cpu(), other.data)
    version = on_gpu.commit()
    assert version.digest == on_host.commit().digest
    for name, tensor in version.pairs():
        assert torch.equal(integers(tensor.cpu()), integers(new[name]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_are_applied_counted_and_digested_on_the_gpu(dtype):
    for old, new in pairs_of(dtype):
        live = old.cuda()
        assert delta.changed(live, new.cuda()) == delta.changed(old, new)
        sums = ops.digest([old])[0]
        for part in parts_of([(live, new.cuda())]):
            part.check([SIZE], [dtype.itemsize])
            for changes in delta.decode(part):
                before = integers(live)[changes.places]
                bits = before, changes.new_bits(before)
                sums += ops.digest_of_changes(changes.places, *bits, dtype.itemsize)
                delta.apply(changes, live)
        assert torch.equal(integers(live.cpu()), integers(new))
        assert sums == ops.digest([new])[0]


def test_a_damaged_part_is_refused_on_the_gpu():
    old = random_bits(torch.bfloat16, SIZE)
    (part,) = parts_of([(old, with_changes(old, scattered(SIZE, 0.01), most=2))])
    on_gpu = delta.Part(part.table.cuda(), part.data.cuda())
    on_gpu.check([SIZE], [2])
    block = on_gpu.blocks()[1]
    for at in (block.chunks_at, block.places_at + 9, block.values_at + 9):
        whole = on_gpu.data[at].clone()
        on_gpu.data[at] = 255
        with pytest.raises(Malformed, match="row 1: "):
            delta.decode(on_gpu)
        on_gpu.data[at] = whole
    assert len(list(delta.decode(on_gpu))) == 1
    on_gpu.data.random_(0, 256)
    with pytest.raises(Malformed, match="row 0: "):
        delta.decode(on_gpu)


def test_the_codec_prints_its_speed():
    old = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    new = old.clone()
    places = torch.arange(50, len(old), 100, device="cuda")
    new.view(torch.int16)[places] += 1
    for _ in range(2):  # the first compiles
        times = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        times[0].record()
        parts = parts_of([(old, new)])
        times[1].record()
        changes = []
        for part in parts:
            part.check([len(old)], [2])
            changes += delta.decode(part)
        times[2].record()
        for each in changes:
            delta.apply(each, old)
        times[3].record()
        times[3].synchronize()
        if torch.equal(old, new):
            old.view(torch.int16)[places] -= 1
    spans = [a.elapsed_time(b) for a, b in pairwise(times)]
    print("encode {:.1f} ms, decode {:.1f} ms, apply {:.1f} ms".format(*spans))
    assert sum(len(each.places) for each in changes) == len(places)
