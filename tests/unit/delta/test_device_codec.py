"""The kernels agree with the host; Triton's interpreter stands in for a GPU."""

from random import Random

import numpy as np
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
from tests.support.triton_compiler import compile_for_gpu, compiles
from tests.support.triton_interpreter import succeeds
from vllm.inflight import delta, ops
from vllm.inflight.delta import reference
from vllm.inflight.delta.decoded import DecodedPart, Groups
from vllm.inflight.delta.encode import VALUES
from vllm.inflight.errors import Conflict, Malformed

pytest.importorskip("triton", reason="Triton is not installed")

RUNS = torch.cat([torch.arange(40 + 90 * n) + 2400 * n for n in range(8)])
"""Short runs and long ones."""
RAGGED = torch.cat((torch.arange(1500), torch.tensor([5_000, 30_000, 39_000])))


def cases():
    """Pairs of tensors, each with another pattern of changes."""
    for dtype in DTYPES:
        old = random_bits(dtype, 3001)
        yield old, with_changes(old, scattered(3001, 0.05))
    old = random_bits(torch.bfloat16, 40_003)
    long = random_bits(torch.bfloat16, 140_001)
    most_gaps = torch.tensor([0, 255, 511, 1020, 1021, 1277, 2000, 70_000, 140_000])
    yield long, with_changes(long, most_gaps, most=300)
    for places in (
        *([], [0], [40_002], range(5), RAGGED, scattered(40_003, 0.01)),
        *(scattered(40_003, 0.0004), scattered(40_003, 0.5), RUNS, [7, 9], range(60)),
    ):
        yield old, with_changes(old, places, most=300)
    for dtype in (torch.float32, torch.int64):
        old = random_bits(dtype, 60_000)
        yield old, with_changes(old, scattered(60_000, 0.03), most=40_000)
    # Lanes that most programs cannot note, and the last one of a tensor not whole.
    for dtype in (torch.int8, torch.int16, torch.float32):
        old = random_bits(dtype, 40_001)
        yield old, with_changes(old, scattered(40_001, 0.6), most=40)
    # Bitmaps and whole blocks that end where the span of a program does, or beside it.
    for size in (4096, 4097):
        old = random_bits(torch.int16, size)
        for places in (scattered(size, 0.5), range(size)):
            yield old, with_changes(old, places, most=300)
    empty = torch.zeros(0)
    yield empty, empty


def coder_of(values, limit=delta.MAX_PART_BYTES):
    """The device's coder; on the host it needs Triton's interpreter."""
    from vllm.inflight.delta.device_encode import DeviceCoder

    return DeviceCoder(limit, VALUES[values])


def add_all(coder, pairs):
    """Encode tensors, numbered from 0 on, all at once."""
    from vllm.inflight.delta.device_encode import Compared, DeviceSearch

    limit = coder._limit
    return coder.add_found(0, DeviceSearch([Compared(0, 0, *p) for p in pairs], limit))


def taken(coder, limit=delta.MAX_PART_BYTES):
    """All parts of the blocks that wait."""
    parts = []
    while coder.num_bytes:
        num_bytes = coder.num_bytes
        parts.append(coder.take(limit))
        if not coder.num_bytes:
            assert parts[-1].num_bytes == num_bytes
    return parts


def decoded(part, place_dtype=torch.int64, given=None):
    """A part as the device decodes it."""
    from vllm.inflight.delta.device_decode import (
        Joined,
        Launches,
        decode_rows,
        require_none,
    )

    launches, device = Launches(torch.device("cpu")), torch.device("cpu")
    room = DecodedPart(Groups(part.rows), device, place_dtype, given)
    room.places.fill_(-1)
    decode_rows(Joined.of([part], launches), room, launches)
    launches.run()
    require_none([room.fault])
    return room


def device_decode(part):
    """(places, bits) of each block, as the device decodes them."""
    room = decoded(part)
    for block, (place, byte) in zip(part.blocks(), room.slots.tolist(), strict=True):
        own = room.bits[byte : byte + block.width * block.num_entries]
        yield (
            room.places[place : place + block.num_entries],
            own.view(ops.INTEGERS[block.width]),
        )


def assert_same(parts, wanted):
    assert len(parts) == len(wanted)
    for one, other in zip(parts, wanted, strict=True):
        assert torch.equal(one.table, other.table)
        assert torch.equal(one.data, other.data)


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    pairs = list(cases())
    counts = [old.numel() for old, _ in pairs]
    widths = [old.element_size() for old, _ in pairs]
    flat = [(integers(old), integers(new)) for old, new in pairs]
    changed = [pair for pair in pairs if delta.changed(*pair)]
    # All tensors at once; those without a change get no number.
    coder = coder_of("auto")
    flags, steps = add_all(coder, flat)
    assert len(flags) == len(pairs) and sum(flags) == len(changed) < len(pairs)
    assert list(steps)
    assert_same(taken(coder), parts_of(changed))
    for values in VALUES:
        few = slice(len(DTYPES))
        coder = coder_of(values)
        for number, pair in enumerate(flat[few]):
            coder.add(number, 0, *pair)
        assert_same(taken(coder), parts_of(pairs[few], values=values))
    (wanted,) = parts_of(pairs)
    coder = coder_of("auto")
    for number, (before, now) in enumerate(flat):
        if len(places := (before != now).nonzero().squeeze(1)):
            coder.add_places(number, places, before[places], now[places])
    assert_same(taken(coder), [wanted])
    for part in (wanted, *parts_of(pairs[: len(DTYPES)], values="raw")):
        part.check(counts, widths)
        decoded = zip(part.blocks(), device_decode(part), strict=True)
        for index, (block, seen) in enumerate(decoded):
            for one, other in zip(
                seen, reference.decode_block(block, index, part.data), strict=True
            ):
                assert torch.equal(one, other), block
    check_unaligned()
    check_parts()
    check_faults()
    check_digests(pairs)


def check_unaligned() -> None:
    """Addresses that are no multiples of 16 give the same parts."""
    pairs = []
    for dtype, share in ((torch.int8, 0.01), (torch.int16, 0.3), (torch.float32, 0.02)):
        whole = random_bits(dtype, 9_001)
        old = whole[1:]
        pairs.append((old, with_changes(old, scattered(9_000, share), most=40)))
    assert any(old.data_ptr() % 16 for old, _ in pairs)
    coder = coder_of("auto")
    assert list(add_all(coder, [tuple(map(integers, pair)) for pair in pairs])[1])
    assert_same(taken(coder), parts_of(pairs))


def check_parts() -> None:
    """Small blocks, small parts and small batches give the parts of the host."""
    from vllm.inflight.delta import device_encode

    limit, device_encode.MOST_ENTRIES = 1 << 16, 40_000
    pairs = []
    for dtype, share in ((torch.int16, 0.7), (torch.int64, 0.02), (torch.int8, 0.1)):
        old = random_bits(dtype, 120_000)
        pairs.append((old, with_changes(old, scattered(120_000, share), most=100)))
    wanted = parts_of(pairs, max_part_bytes=limit)
    assert len(wanted) > 2
    coder = coder_of("auto", limit)
    flags, steps = add_all(coder, [tuple(map(integers, pair)) for pair in pairs])
    assert all(flags) and len(list(steps)) > 2
    assert_same(taken(coder, limit), wanted)


def check_faults() -> None:
    """The device refuses what the host refuses, and names the same row."""
    rng = Random(1)
    pairs = []
    for dtype, share in (
        (torch.int16, 0.03),
        (torch.float32, 0.001),
        (torch.int8, 0.4),
    ):
        old = random_bits(dtype, 20_000)
        pairs.append((old, with_changes(old, scattered(20_000, share), most=200)))
    old = random_bits(torch.int16, 20_000)
    for places in (RUNS, torch.arange(3000)):
        pairs.append((old, with_changes(old, places, most=200)))
    (part,) = parts_of(pairs)
    part.check([20_000] * 5, [2, 4, 1, 2, 2])
    assert {block.form for block in part.blocks()} == {1, 2, 3, 4, 5}
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
    assert refused > 30, refused


def check_joined() -> None:
    """Parts that are decoded together give the changes of parts decoded alone."""
    from vllm.inflight.delta.decode import decode, decode_joined, require_sound
    from vllm.inflight.delta.device_decode import Launches

    pairs = [
        (old, with_changes(old, scattered(60_000, share), most=most))
        for dtype, share, most in (
            (torch.int16, 0.5, 300),
            (torch.float32, 0.4, 40_000),
            (torch.int8, 0.01, 100),
            (torch.int16, 0.02, 300),
        )
        for old in [random_bits(dtype, 60_000)]
    ]
    parts = parts_of(pairs, max_part_bytes=1 << 16)
    # The data of the first part does not lie first, and one lies between two words.
    parts = [
        delta.Part(
            part.table, torch.cat([torch.zeros(3, dtype=torch.uint8), part.data])[3:]
        )
        if number == 1
        else part
        for number, part in enumerate(parts)
    ]
    counts = [old.numel() for old, _ in pairs]
    widths = [old.element_size() for old, _ in pairs]
    for part in parts:
        part.check(counts, widths)
    assert len(parts) > 2
    for some in (parts, parts[:1], parts[1:3]):
        launches = Launches(torch.device("cpu"))
        together = decode_joined(some, launches)
        launches.run()
        require_sound([together.fault])
        for number in set(together.groups.numbers.tolist()):
            places, bits = (
                [torch.cat(each) for each in zip(*pairs_of, strict=True)]
                for pairs_of in (
                    [(e.places, e.bits) for e in together if e.number == number],
                    [
                        (e.places, e.bits)
                        for part in some
                        for e in decode(part)
                        if e.number == number
                    ],
                )
            )
            assert all(map(torch.equal, places, bits))
    # A fault is told with the number of its row in its own part.
    last = parts[-1]
    block = last.blocks()[-1]
    size = reference.section_bytes(block)[0]
    last.data[block.chunks_at : block.chunks_at + size] = 255
    launches = Launches(torch.device("cpu"))
    together = decode_joined(parts, launches)
    launches.run()
    with pytest.raises(Malformed, match=f"row {len(last.blocks()) - 1}: "):
        require_sound([together.fault])


@pytest.mark.seconds
def test_a_device_decodes_parts_together_as_it_decodes_them_alone():
    succeeds(f"{__name__}:check_joined")


def check_given() -> None:
    """Groups are decoded to memory that is given for them, and the others beside it,
    with places of 4 bytes as with those of 8."""
    sizes = {"gaps": 0.05, "wide gaps": 0.0008, "bitmap": 0.5}
    ranges = {"runs": RUNS, "whole": range(5_000)}
    pairs = []
    for places in (*(scattered(5_000, s) for s in sizes.values()), *ranges.values()):
        at = torch.as_tensor([place for place in list(places) if place < 5_000])
        old = random_bits(torch.int16, 5_000)
        pairs += [(old, with_changes(old, at, most=most)) for most in (90, 30_000)]
    (part,) = parts_of(pairs)
    part.check([5_000] * len(pairs), [2] * len(pairs))
    wanted, groups = list(delta.decode(part)), Groups(part.rows)
    assert len({block.form for block in part.blocks()}) >= 4
    for place_bytes, dtype in ((4, torch.int32), (8, torch.int64)):
        # Every second group has memory for its places, and every third for its bits.
        given = np.zeros((len(groups), 2), dtype=np.int64)
        memory = {}
        for group, count in enumerate(groups.counts.tolist()):
            room = (
                torch.full((count,), -1, dtype=dtype),
                torch.zeros(count, dtype=torch.int16),
            )
            for column, every in enumerate((2, 3)):
                if group % every == 0:
                    memory[group, column] = room[column]
                    given[group, column] = room[column].data_ptr()
        found = decoded(part, dtype, given)
        assert found.places.element_size() == place_bytes
        for group, changes in enumerate(wanted):
            own = found.changes_of(group)
            places = memory.get((group, 0), own.places)[: len(changes.places)]
            bits = memory.get((group, 1), own.bits)[: len(changes.bits)]
            assert torch.equal(places.long(), changes.places), group
            assert torch.equal(bits, changes.bits), group


@pytest.mark.seconds
def test_a_device_decodes_to_memory_that_is_given():
    succeeds(f"{__name__}:check_given")


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


def check_changed_meanwhile() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    from vllm.inflight.delta.device_encode import Compared, DeviceSearch

    size, other = 9_000, integers(random_bits(torch.int8, 500))
    for dtype, share in ((torch.int16, 0.01), (torch.float32, 0.7)):
        for is_more in (True, False):
            old = random_bits(dtype, size)
            before = integers(old)
            now = integers(with_changes(old, scattered(size, share), most=100))
            pairs = [(other, other + 1), (before, now), (other, other + 1)]
            coder = coder_of("auto")
            compared = [Compared(0, 0, *pair) for pair in pairs]
            search = DeviceSearch(compared, coder._limit)
            search.wait()
            search.number_from(0)
            now.copy_(before + 1 if is_more else before)
            entries, torn = search.entries(0, len(search.blocks.counts))
            assert torn.item() == 1
            for end in (slice(len(other)), slice(-len(other), None)):
                assert torch.equal(entries.places[end], torch.arange(len(other)).int())
                assert entries.differences[end].eq(1).all()
            with pytest.raises(Conflict, match="changed while they were compared"):
                list(coder._encode(search))


@pytest.mark.seconds
def test_weights_that_change_while_they_are_compared_are_told_and_overwrite_nothing():
    succeeds(f"{__name__}:check_changed_meanwhile")


def compile_kernels() -> None:
    """Compile every kernel for a GPU that need not be there."""
    from vllm.inflight.delta import triton_kernels as codec
    from vllm.inflight.ops import triton_kernels as digests

    bits, long = "*i16", "*i64"
    rows = {"rows": long, "owners": "*i32"}
    entries = {"places": "*i32", "news": long, "differences": long}
    part = {"data": "*u8", "fault": long}
    places = [("PLACE", codec.INTEGERS[size]) for size in (4, 8)]
    integer, lanes = ("INTEGER", codec.INTEGERS[2]), ("LANES", 1024)
    block, one = ("BLOCK", 256), {"num": "i32"}
    found = {"num_lanes": "*i32", "lanes": "*i16"}
    measured = {"places": "*i32", "differences": long, "sums": long}
    programs = {"num_programs": "i32"}
    for width, is_aligned in ((1, True), (2, True), (2, False), (8, True)):
        search = codec._options(width, is_aligned=is_aligned).items()
        for kernel, arguments in (
            (codec._count, rows | {"counts": "*i32"} | found),
            (
                codec._compact,
                rows
                | {"counts": "*i32", **found, "firsts": long}
                | entries
                | {"torn": long, "first_program": "i32"},
            ),
        ):
            compile_for_gpu(kernel, arguments, [*search])
    for kernel, arguments, constants in (
        (codec._measure, rows | measured | programs, [lanes]),
        (
            codec._encode,
            rows | entries | {"sums": long, "data": "*u8"} | programs,
            [lanes, ("CODES", 1024), ("MOST_BYTES", 2)],
        ),
        *(
            (codec._decode_gaps, rows | part, [place, integer, ("CODES", 1024)])
            for place in places
        ),
        (
            codec._tally,
            rows | {"data": "*u8", "tallies": "*i32"} | programs,
            [("SPAN", codec.SPAN)],
        ),
        *(
            (
                codec._decode_others,
                rows | {"sums": "*i32"} | part | programs,
                [place, integer, lanes, ("SPAN", codec.SPAN)],
            )
            for place in places
        ),
        *(
            (
                codec._decode_runs,
                {"rows": long, "data": "*u8", "fault": long},
                [place, lanes, ("SHORT", 64)],
            )
            for place in places
        ),
        (codec._apply, rows, [integer, lanes]),
        (
            digests._changes,
            {"places": long, "old_bits": bits, "new_bits": bits, "sums": long} | one,
            [("WIDTH", 2), block],
        ),
    ):
        compile_for_gpu(kernel, arguments, constants)


@pytest.mark.seconds
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    compiles(f"{__name__}:compile_kernels", tmp_path)
