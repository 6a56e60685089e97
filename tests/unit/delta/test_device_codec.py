"""The kernels agree with the host; Triton's interpreter stands in for a GPU."""

from array import array
from random import Random

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
from tests.support.triton_compiler import compile_for_gpu, succeeds
from vllm.inflight import delta, ops
from vllm.inflight.delta import reference
from vllm.inflight.delta.encode import VALUES
from vllm.inflight.errors import Malformed

pytest.importorskip("triton", reason="Triton is not installed")

RAGGED = torch.cat((torch.arange(1500), torch.tensor([5_000, 90_000, 99_000])))


def cases():
    """Pairs of tensors, each with another pattern of changes."""
    for dtype in DTYPES:
        old = random_bits(dtype, 3001)
        yield old, with_changes(old, scattered(3001, 0.05))
    old = random_bits(torch.bfloat16, 100_003)
    most_gaps = torch.tensor([0, 255, 511, 1020, 1021, 1277, 2000, 70_000])
    for places in (
        *([], [0], [100_002], range(5), RAGGED, most_gaps, scattered(100_003, 0.01)),
        *(scattered(100_003, 0.0004), scattered(100_003, 0.5)),
    ):
        yield old, with_changes(old, places, most=300)
    for dtype in (torch.float32, torch.int64):
        old = random_bits(dtype, 60_000)
        yield old, with_changes(old, scattered(60_000, 0.03), most=40_000)
    empty = torch.zeros(0)
    yield empty, empty


def device_part(pairs, values):
    """The part that the device's coder makes, on the host under the interpreter."""
    from vllm.inflight.delta.device_encode import DeviceCoder

    coder = DeviceCoder(delta.MAX_PART_BYTES, VALUES[values])
    for number, (old, new) in enumerate(pairs):
        coder.add(number, 0, integers(old), integers(new))
    return coder.take(delta.MAX_PART_BYTES)


def device_decode(part):
    """(places, bits) of each block, as the device decodes them."""
    from vllm.inflight.delta.device_decode import decode_blocks

    blocks, slots, num = part.blocks(), array("Q"), 0
    for block in blocks:
        slots.extend((num, 8 * num))
        num += block.num_entries
    places = torch.full((num,), -1)
    bits = torch.zeros(8 * num, dtype=torch.uint8)
    decode_blocks(blocks, part.data, slots, places, bits)
    for block, (place, byte) in zip(
        blocks, zip(slots[::2], slots[1::2], strict=True), strict=True
    ):
        own = bits[byte : byte + block.width * block.num_entries]
        yield (
            places[place : place + block.num_entries],
            own.view(ops.INTEGERS[block.width]),
        )


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("size", [1024, 8192, 1 << 22])
def test_all_blocks_at_once_are_encoded_as_one_by_one(size, values):
    from vllm.inflight.delta.device_encode import encode_blocks

    for old, new in cases():
        before, now = integers(old), integers(new)
        places = (before != now).nonzero().squeeze(1)
        if not len(places):
            continue
        bits = before[places], now[places]
        seen = list(encode_blocks(0, places, *bits, size, VALUES[values]))
        _, counts = (places // size).unique_consecutive(return_counts=True)
        assert len(seen) == len(counts)
        first = 0
        for block, count in zip(seen, counts.tolist(), strict=True):
            own = slice(first, first + count)
            wanted = reference.encode_block(
                0, places[own], bits[0][own], bits[1][own], VALUES[values]
            )
            assert block.row == wanted.row
            for one, other in zip(block.sections, wanted.sections, strict=True):
                assert torch.equal(one, other)
            first += count


def test_many_changes_are_encoded_stretch_by_stretch(monkeypatch):
    from vllm.inflight.delta import device_encode

    limit = 1 << 16
    monkeypatch.setattr(device_encode, "MOST_ENTRIES", 40_000)
    old = random_bits(torch.int16, 300_000)
    new = with_changes(old, scattered(300_000, 0.7), most=300)
    places = (old != new).nonzero().squeeze(1)
    coder = device_encode.DeviceCoder(limit, 0)
    coder.add_places(0, places, old[places], new[places])
    parts = []
    while coder.num_bytes:
        parts.append(coder.take(limit))
    wanted = parts_of([(old, new)], max_part_bytes=limit)
    assert len(parts) == len(wanted) > 3
    for one, other in zip(parts, wanted, strict=True):
        assert torch.equal(one.table, other.table)
        assert torch.equal(one.data, other.data)


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    pairs = list(cases())
    counts = [old.numel() for old, _ in pairs]
    widths = [old.element_size() for old, _ in pairs]
    for values in VALUES:
        (wanted,) = parts_of(pairs, values=values)
        part = device_part(pairs, values)
        assert torch.equal(part.table, wanted.table)
        assert torch.equal(part.data, wanted.data)
        part.check(counts, widths)
        blocks = part.blocks()
        decoded = zip(blocks, device_decode(part), strict=True)
        for index, (block, seen) in enumerate(decoded):
            for one, other in zip(
                seen, reference.decode_block(block, index, part.data), strict=True
            ):
                assert torch.equal(one, other), (values, block)
    check_faults()
    check_digests(pairs)


def check_faults() -> None:
    """The device refuses what the host refuses, and names the same row."""
    rng = Random(1)
    pairs = []
    for dtype, share in (
        (torch.int16, 0.03),
        (torch.float32, 0.001),
        (torch.int8, 0.4),
    ):
        old = random_bits(dtype, 50_000)
        pairs.append((old, with_changes(old, scattered(50_000, share), most=200)))
    (part,) = parts_of(pairs)
    part.check([50_000] * 3, [2, 4, 1])
    whole, refused = part.data.clone(), 0
    for _ in range(100):
        part.data.copy_(whole)
        block = rng.choice(part.blocks())
        sections = zip(
            (block.chunks_at, block.places_at, block.values_at),
            reference.section_bytes(block),
            strict=False,
        )
        start, size = rng.choice([each for each in sections if each[1]])
        part.data[start + rng.randrange(size)] = rng.choice([0, 1, 254, 255])
        try:
            list(delta.decode(part))
        except Malformed as error:
            row = str(error).split(":")[1]
        else:
            list(device_decode(part))
            continue
        refused += 1
        with pytest.raises(Malformed, match=f":{row}: "):
            list(device_decode(part))
    assert refused > 30


def check_digests(pairs) -> None:
    from vllm.inflight.ops.triton_kernels import sums_of_changes

    for old, new in pairs:
        before, now = integers(old), integers(new)
        places = (before != now).nonzero().squeeze(1)
        for shift in (0, 2**33 + 1, 2**40):
            bits = before[places], now[places]
            sums = ops.Digest(*sums_of_changes(places + shift, *bits))
            width = old.element_size()
            assert sums == ops.digest_of_changes(places + shift, *bits, width)


@pytest.mark.seconds
def test_a_device_encodes_decodes_and_digests_as_the_host_does():
    succeeds(f"{__name__}:check")


def compile_kernels() -> None:
    """Compile every kernel for a GPU that need not be there."""
    from vllm.inflight.delta import triton_kernels as codec
    from vllm.inflight.ops import triton_kernels as digests

    bits, long = "*i16", "*i64"
    block, one = ("BLOCK", 256), {"num": "i32"}
    found = {"firsts": long, "places": long, "olds": bits, "news": bits} | one
    both = {"old": bits, "new": bits}
    integer = codec.INTEGERS[2]
    for kernel, arguments, constants in (
        (codec._count, both | {"counts": "*i32"} | one, [block]),
        (codec._compact, both | found | {"start": "i64"}, [block]),
        (
            codec._decode_gaps,
            {"rows": long, "owners": "*i32", "data": "*u8", "places": long}
            | {"bits": "*u8", "fault": long},
            [("INTEGER", integer), ("CODES", 1024)],
        ),
        (
            digests._changes,
            {"places": long, "old_bits": bits, "new_bits": bits, "sums": long} | one,
            [("WIDTH", 2), block],
        ),
    ):
        compile_for_gpu(kernel, arguments, constants)


@pytest.mark.seconds
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    succeeds(f"{__name__}:compile_kernels", tmp_path)
