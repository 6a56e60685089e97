"""A delta is lossless, and native core and reference write and read the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.deltas import (
    DTYPES,
    applied,
    decoded,
    integers,
    parts_of,
    random_bits,
    scattered,
    with_changes,
)
from vllm.inflight import delta, ops
from vllm.inflight.delta import PlaceForm, ValueForm, reference
from vllm.inflight.delta.encode import VALUES
from vllm.inflight.delta.part import MAX_ELEMENTS, bring_tables
from vllm.inflight.errors import Malformed

SIZES = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 129, 1001, 5003]


def reference_part(pairs, values="auto", block=MAX_ELEMENTS):
    """The part that the reference makes of all changes."""
    blocks = []
    for number, (old, new) in enumerate(pairs):
        before, now = integers(old), integers(new)
        places = (before != now).nonzero().squeeze(1)
        for start in range(0, len(before), block):
            inside = places[(places >= start) & (places < start + block)]
            if len(inside):
                bits = before[inside], now[inside]
                blocks.append(
                    reference.encode_block(number, inside, *bits, VALUES[values])
                )
    return reference.assemble(blocks, torch.device("cpu"))


def assert_same_bits(seen, wanted):
    assert torch.equal(integers(seen), integers(wanted))


def assert_codec(pairs, values="auto"):
    """Every way to encode and decode these changes gives the same result."""
    olds = [old for old, _ in pairs]
    parts = parts_of(pairs, values=values)
    for seen, (_, new) in zip(applied(parts, olds), pairs, strict=True):
        assert_same_bits(seen, new)
    changes = decoded(parts, olds)
    for number, (old, new) in enumerate(pairs):
        wanted = (integers(old) != integers(new)).nonzero().squeeze(1)
        of_tensor = [each.places for each in changes if each.number == number]
        assert torch.equal(torch.cat([*of_tensor, wanted[:0]]), wanted)
        assert delta.changed(old, new) == len(wanted)
    if not any(delta.changed(*pair) for pair in pairs):
        assert parts == []
        return
    (part,) = parts
    other = reference_part(pairs, values)
    assert part.table.tolist() == other.table.tolist()
    assert torch.equal(part.data, other.data)
    for index, block in enumerate(part.blocks()):
        places, bits = reference.decode_block(block, index, part.data)
        (seen,) = [
            each
            for each in changes
            if each.number == block.number and block.first in each.places
        ]
        at = (seen.places >= block.first) & (
            seen.places < block.first + block.num_elements
        )
        assert torch.equal(seen.places[at], places)
        assert torch.equal(seen.bits[at], bits)
        assert seen.are_differences == (block.values == ValueForm.DIFFERENCE)
    assert_known_places(pairs, values, part)


def assert_known_places(pairs, values, part):
    encoder = delta.Encoder(values=values)
    for number, (old, new) in enumerate(pairs):
        places = (integers(old) != integers(new)).nonzero().squeeze(1)
        bits = old.reshape(-1)[places], new.reshape(-1)[places]
        assert list(encoder.add_places(number, places, *bits)) == []
    (other,) = encoder.finish()
    assert torch.equal(part.table, other.table)
    assert torch.equal(part.data, other.data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_every_dtype_and_size_comes_back_bit_by_bit(dtype, values):
    pairs = []
    for size in SIZES:
        old = random_bits(dtype, size)
        for places in ([], range(0, size, 3), range(size), range(size - 1, size)):
            inside = [place for place in places if place >= 0]
            pairs.append((old, with_changes(old, inside)))
    assert_codec(pairs, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0003, 0.01, 0.3, 0.9])
def test_scattered_changes_come_back_bit_by_bit(dtype, share):
    old = random_bits(dtype, 200_003)
    most = 0 if dtype is torch.bool else 2
    assert_codec([(old, with_changes(old, scattered(len(old), share), most=most))])


GAPS = [0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 65533, 65534, 65535, 65536]
GAPS += [131069, 131070, 131071]


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 2049])
def test_gaps_around_the_largest_codes_and_borders_of_chunks(gap, count):
    if gap > 1000:
        count = min(count, 30)
    places = torch.arange(count) * (gap + 1)
    # One more, so that the forms for regular places do not win.
    places = torch.cat((places, places[-1:] + 5))
    old = random_bits(torch.int8, int(places[-1]) + 3)
    assert_codec([(old, with_changes(old, places))])


@pytest.mark.parametrize("form", [PlaceForm.GAPS8, PlaceForm.GAPS16])
@pytest.mark.parametrize("num_most", [1, 1022, 1023, 1024, 1025, 2047, 2048])
def test_a_run_of_maximal_codes_may_cross_chunks(form, num_most):
    most = 255 if form is PlaceForm.GAPS8 else 65535
    num_most = num_most if most == 255 else num_most // 64 + 1
    # Many near places, which make this form the smallest, then a gap of many codes.
    near = torch.arange(3000) * (20 if most == 255 else 700)
    far = near[-1:] + most * num_most + 1
    places = torch.cat((near, far, far + most, far + most * 2))
    old = random_bits(torch.int16, int(places[-1]) + 1)
    pair = old, with_changes(old, places)
    assert_codec([pair])
    (part,) = parts_of([pair])
    decoded([part], [old])
    assert {block.form for block in part.blocks()} == {form}


FORMS = {
    PlaceForm.GAPS8: scattered(100_000, 0.02),
    PlaceForm.GAPS16: scattered(1_000_000, 0.0005),
    PlaceForm.BITMAP: scattered(100_000, 0.4),
    PlaceForm.RUNS: torch.cat([torch.arange(64) + 999 * row for row in range(50)]),
    PlaceForm.WHOLE: torch.arange(1000) + 77,
}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_the_smallest_form_of_places_is_taken(form, dtype):
    old = random_bits(dtype, 1_000_000)
    pair = old, with_changes(old, FORMS[form])
    assert_codec([pair])
    (part,) = parts_of([pair])
    decoded([part], [old])
    assert [block.form for block in part.blocks()] == [form]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("step", [1, 127, 128, 32767, 32768])
def test_differences_around_the_escape_come_back(dtype, step):
    if step >= 1 << 8 * dtype.itemsize - 1:
        step = 1
    old = random_bits(dtype, 4000)
    new = old.clone()
    integers(new)[::2] += step
    integers(new)[1::4] -= step
    integers(new)[3::12] ^= 1 << 8 * dtype.itemsize - 2
    for values in VALUES:
        assert_codec([(old, new)], values)


def test_nan_payloads_and_negative_zero_are_kept():
    quiet, signalling = 0x7FC00001, 0x7F800001
    old = torch.tensor([0, quiet, 0, 5, signalling], dtype=torch.int32).view(
        torch.float32
    )
    negative_zero = -(2**31)
    new = torch.tensor([negative_zero, quiet + 1, quiet, 5, 0], dtype=torch.int32)
    assert_codec([(old, new.view(torch.float32))])


def test_a_change_of_nothing_has_no_part():
    same = random_bits(torch.bfloat16, 10_000)
    assert parts_of([(same, same.clone())]) == []
    nan = torch.full((7,), torch.nan)
    assert parts_of([(nan, nan.clone())]) == []


@st.composite
def changes_of_tensors(draw):
    pairs = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        size = draw(st.integers(0, 3000))
        old = random_bits(dtype, size, seed=draw(st.integers(0, 9)))
        places = torch.zeros(0, dtype=torch.int64)
        if size:
            gaps = draw(st.lists(st.integers(1, 700), max_size=40))
            runs = draw(st.lists(st.integers(1, 300), max_size=3))
            starts = [draw(st.integers(0, size - 1)) for _ in runs]
            found = {sum(gaps[: n + 1]) for n in range(len(gaps))}
            for start, run in zip(starts, runs, strict=True):
                found |= set(range(start, start + run))
            places = torch.tensor(sorted(p for p in found if p < size)).long()
        most = 0 if dtype is torch.bool else draw(st.sampled_from([0, 1, 2, 100]))
        pairs.append((old, with_changes(old, places, most=most)))
    return pairs


@given(changes_of_tensors(), st.sampled_from(list(VALUES)))
@settings(deadline=None, max_examples=150)
def test_any_changes_of_any_tensors_come_back(pairs, values):
    assert_codec(pairs, values)


# Blocks and parts


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("share", [0.01, 0.5, 1])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_no_part_exceeds_its_limit_and_the_parts_fill_up(dtype, share, num_threads):
    limit = 1 << 16
    olds = [random_bits(dtype, size) for size in (200_000, 3, 70_001)]
    pairs = [(old, with_changes(old, scattered(len(old), share))) for old in olds]
    options = {"max_part_bytes": limit, "num_threads": num_threads}
    parts = parts_of(pairs, **options)
    sizes = [part.num_bytes for part in parts]
    assert max(sizes) <= limit
    assert all(size >= limit // 4 for size in sizes[:-1])
    for seen, (_, new) in zip(applied(parts, olds), pairs, strict=True):
        assert_same_bits(seen, new)
    again = parts_of(pairs, max_part_bytes=limit)
    tables = [part.table.tolist() for part in parts]
    assert tables == [part.table.tolist() for part in again]


def test_known_places_are_cut_into_the_same_blocks():
    old = random_bits(torch.int32, 100_000)
    new = with_changes(old, scattered(len(old), 0.2))
    places = (old != new).nonzero().squeeze(1)
    encoder = delta.Encoder(1 << 16)
    parts = list(encoder.add_places(0, places, old[places], new[places]))
    parts += encoder.finish()
    wanted = parts_of([(old, new)], max_part_bytes=1 << 16)
    assert [p.table.tolist() for p in parts] == [p.table.tolist() for p in wanted]
    assert all(torch.equal(a.data, b.data) for a, b in zip(parts, wanted, strict=True))


def test_places_beyond_32_bits_are_kept():
    places = torch.tensor([3, 2**33 + 5, 2**33 + 6, 2**40])
    bits = random_bits(torch.int16, 4), random_bits(torch.int16, 4, seed=1)
    encoder = delta.Encoder()
    parts = [*encoder.add_places(0, places, *bits), *encoder.finish()]
    (part,) = parts
    part.check([2**40 + 1], [2])
    seen = list(delta.decode(part))
    assert torch.equal(torch.cat([each.places for each in seen]), places)


def test_an_encoder_refuses_what_is_no_delta():
    flat = torch.zeros(8)
    encoder = delta.Encoder()
    for old, new, words in (
        (flat, torch.zeros(9), "one shape"),
        (flat, torch.zeros(8).double(), "one shape, dtype"),
        (torch.zeros(4, 4).t(), torch.zeros(4, 4).t(), "contiguous"),
        (flat.to(torch.complex64), flat.to(torch.complex64), "no elements of"),
    ):
        with pytest.raises(ValueError, match=words):
            list(encoder.add(0, old, new))
    for positions, words in (
        ([3, 3], "strictly increase"),
        ([3, 2], "strictly increase"),
        ([-1, 2], "negative"),
        ([0, 2**22 + 1, 2**22], "strictly increase"),
    ):
        encoder = delta.Encoder()
        bits = torch.zeros(len(positions))
        with pytest.raises(ValueError, match=words):
            list(encoder.add_places(0, torch.tensor(positions), bits, bits))
    with pytest.raises(ValueError, match="int64 for each"):
        list(encoder.add_places(1, torch.tensor([1]), flat, flat))
    with pytest.raises(ValueError, match="int64 for each"):
        list(encoder.add_places(1, torch.arange(8, device="meta"), flat, flat))
    for options in ({"max_part_bytes": 1}, {"values": "any"}, {"num_threads": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            delta.Encoder(**options)


def test_tensors_come_in_the_order_of_their_numbers():
    old = torch.zeros(8)
    encoder = delta.Encoder()
    list(encoder.add(3, old, old))
    for number in (2, -1, 2**32):
        with pytest.raises(ValueError, match="order of their numbers"):
            list(encoder.add(number, old, old))
    assert not encoder.has_changed
    list(encoder.add(3, old, old + 1))  # the one before has not changed
    assert encoder.has_changed
    with pytest.raises(ValueError, match="order of their numbers"):
        list(encoder.add(3, old, old))
    places = torch.tensor([1, 5])
    list(encoder.add_places(4, places, old[:2], old[:2]))
    list(encoder.add_places(4, places + 5, old[:2], old[:2]))
    with pytest.raises(ValueError, match="order of their numbers"):
        list(encoder.add_places(4, places + 6, old[:2], old[:2]))
    list(encoder.finish())
    list(encoder.add(0, old, old))  # the next delta


def test_changes_give_new_bits_and_apply_to_a_tensor():
    old = torch.tensor([5, 6, 7, 8], dtype=torch.int16)
    raw = delta.Changes(0, torch.tensor([1, 3]), old[:2] * 0 + 1, False)
    added = delta.Changes(0, torch.tensor([1, 3]), old[:2] * 0 - 1, True)
    assert raw.new_bits(old[[1, 3]]).tolist() == [1, 1]
    assert added.new_bits(old[[1, 3]]).tolist() == [5, 7]
    delta.apply(added, old.view(torch.bfloat16))
    assert old.tolist() == [5, 5, 7, 7]
    delta.apply(raw, old)
    assert old.tolist() == [5, 1, 7, 1]
    for wrong, words in (
        (old[:3], "beyond the tensor"),
        (old[::2], "flat, contiguous"),
        (old.view(2, 2), "flat, contiguous"),
        (old.int(), "another width"),
    ):
        before = wrong.clone()
        with pytest.raises(ValueError, match=words):
            delta.apply(raw, wrong)
        assert torch.equal(wrong, before)
    negative = delta.Changes(0, torch.tensor([-1]), old[:1], False)
    with pytest.raises(ValueError, match="beyond the tensor"):
        delta.apply(negative, old)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_changes_are_applied_by_threads(width, num_threads):
    dtype = ops.INTEGERS[width]
    old = random_bits(dtype, 3_000_000)
    new = with_changes(old, scattered(len(old), 0.8), most=100)
    for values in ("raw", "difference"):
        seen = old.clone()
        for changes in decoded(parts_of([(old, new)], values=values), [old]):
            delta.apply(changes, seen, num_threads=num_threads)
        assert torch.equal(seen, new)


# Bars


def test_a_change_of_one_percent_costs_at_most_two_and_a_half_bytes_each():
    old = torch.randn(4_000_000, generator=torch.Generator().manual_seed(1))
    old = (old * 0.02).to(torch.bfloat16)
    places = scattered(len(old), 0.01)
    parts = parts_of([(old, with_changes(old, places, most=2))])
    assert sum(part.num_bytes for part in parts) <= 2.5 * len(places)


def test_several_tensors_are_numbered_by_those_that_have_changed():
    old = random_bits(torch.bfloat16, 9_000)
    changed = with_changes(old, scattered(9_000, 0.02), most=2)
    wide = random_bits(torch.int64, 50), random_bits(torch.int64, 50, seed=1)
    pairs = [(old, changed), (old, old), wide, (old[:0], old[:0]), (changed, old)]
    encoder = delta.Encoder()
    parts = [*encoder.add_all(0, pairs[:3]), *encoder.add_all(2, pairs[3:])]
    assert encoder.have_changed == [False, True]
    (part,) = [*parts, *encoder.finish()]
    (wanted,) = parts_of([pairs[0], pairs[2], pairs[4]])
    assert torch.equal(part.table, wanted.table)
    assert torch.equal(part.data, wanted.data)


def test_tables_of_several_parts_come_to_the_host_at_once():
    old = random_bits(torch.int16, 300_000)
    parts = parts_of(
        [(old, with_changes(old, scattered(300_000, 0.7)))], max_part_bytes=1 << 16
    )
    wanted = [part.table.clone() for part in parts]
    bring_tables(parts)
    for part in parts:
        part.table[8] ^= 1  # what was brought cannot be changed any more
    for part, table in zip(parts, wanted, strict=True):
        part.check([len(old)], [2])
        assert torch.equal(part.checked_table, table)
    with pytest.raises(Malformed):
        parts[0].check([len(old)], [2])  # a second check looks again
