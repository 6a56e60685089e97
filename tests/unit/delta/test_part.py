"""A part is checked before use, and a fault is refused by row and reason."""

import random
import sys

import pytest
import torch

from tests.support.deltas import parts_of, random_bits, scattered, with_changes
from vllm.inflight import delta
from vllm.inflight.delta import Part
from vllm.inflight.delta.part import HEADER, ROW
from vllm.inflight.errors import ConfigError, Malformed

SIZES, WIDTHS = [100_000, 5_000, 9_000, 40], [2, 4, 2, 8]
OLDS = [
    random_bits(dtype, size)
    for dtype, size in zip(
        (torch.bfloat16, torch.float32, torch.int16, torch.int64), SIZES, strict=True
    )
]
PLACES = [
    scattered(SIZES[0], 0.02),
    torch.cat([torch.arange(64) + 999 * row for row in range(4)]),
    scattered(SIZES[2], 0.4),
    torch.arange(40),
]


def part() -> Part:
    """One part with all forms of places: gaps, runs, bitmap, whole."""
    pairs = []
    for old, places in zip(OLDS, PLACES, strict=True):
        new = with_changes(old, places, most=2)
        new.view(torch.uint8)[int(places[7]) * old.element_size() + 1] ^= 64
        pairs.append((old, new))
    (made,) = parts_of(pairs)
    return made


def fields(of: Part, row: int) -> list[int]:
    return list(ROW.unpack_from(of.table.numpy().data, HEADER.size + row * ROW.size))


def with_row(row: int, **changed: int) -> Part:
    """A part with some fields of a row changed."""
    made = part()
    names = list(delta.Block.__dataclass_fields__)
    values = fields(made, row)
    for name, value in changed.items():
        values[names.index(name)] = value
    ROW.pack_into(made.table.numpy().data, HEADER.size + row * ROW.size, *values)
    return made


def with_header(at: int, value: object) -> Part:
    made = part()
    values = list(HEADER.unpack_from(made.table.numpy().data))
    values[at] = value
    HEADER.pack_into(made.table.numpy().data, 0, *values)
    return made


def read(made: Part) -> list[delta.Changes]:
    made.check(SIZES, WIDTHS)
    return list(delta.decode(made))


def test_the_part_of_these_tests_has_every_form():
    made = part()
    assert len(read(made)) == 4
    assert [block.form for block in made.blocks()] == [1, 4, 3, 5]
    assert all(block.num_exceptions for block in made.blocks())


@pytest.mark.parametrize(
    "made, words",
    [
        (with_header(0, b"vifdelte"), "begin with 'vifdelta'"),
        (with_header(1, 2), "version 2 is not known"),
        (with_header(2, 2), "unknown flags"),
        (with_header(4, 1), "unknown flags"),
        (with_header(3, 3), "number of rows"),
        (with_header(3, 2**32 - 1), "number of rows"),
        (with_header(5, 8), "two lengths"),
        (with_header(6, 8), "header announces 8"),
        (with_row(1, number=4), "row 1: the delta names no tensor of that number"),
        (with_row(1, number=0), "row 1: the tensor's elements have another width"),
        (with_row(2, number=0), "row 2: it is not behind"),
        (with_row(1, width=3), "row 1: an element has 1, 2, 4 or 8"),
        (with_row(1, width=8), "row 1: the tensor's elements have another width"),
        (with_row(1, form=0), "row 1: unknown form of places"),
        (with_row(1, form=6), "row 1: unknown form of places"),
        (with_row(1, values=3), "row 1: unknown form of values"),
        (with_row(1, values=1), "row 1: raw values have no codes"),
        (with_row(0, code_bytes=2), "row 0: wrong width of the codes"),
        (with_row(1, code_bytes=4), "row 1: wrong width of the codes"),
        (with_row(1, num_elements=0), "row 1: a block has 1 to 4194304"),
        (with_row(1, num_elements=2**22 + 1), "row 1: a block has 1 to 4194304"),
        (with_row(1, num_elements=5001), "row 1: the block reaches beyond"),
        (with_row(1, first=3000), "row 1: the block reaches beyond"),
        (with_row(1, first=2**64 - 1), "row 1: the block reaches beyond"),
        (with_row(1, num_entries=0), "row 1: a block has at least one entry"),
        (with_row(3, num_elements=39), "row 3: a block has at least one entry"),
        (with_row(1, num_exceptions=2**20), "row 1: more exceptions than entries"),
        (with_row(0, num_codes=1), "row 0: the number of codes does not fit"),
        (with_row(0, num_codes=2**31), "row 0: the number of codes does not fit"),
        (with_row(1, num_codes=0), "row 1: the number of codes does not fit"),
        (with_row(2, num_codes=1), "row 2: the number of codes does not fit"),
        (with_row(3, num_entries=39), "row 3: a whole block"),
        (with_row(0, places_at=0), "row 0: a section is not in its place"),
        (with_row(2, exceptions_at=2**63), "row 2: a section is not in its place"),
        (with_row(0, num_exceptions=2), "row 0: the codes of differences|its place"),
        (with_row(0, num_exceptions=40), "do not fill data"),
        (Part(part().table[:20], part().data), "shorter than its header"),
        (Part(part().table[:-1], part().data), "number of rows"),
        (Part(part().table, part().data[:-8]), "header announces"),
    ],
)
def test_a_wrong_table_is_refused_with_the_row_and_the_reason(made, words):
    with pytest.raises(Malformed, match=words):
        read(made)


def test_rows_of_one_tensor_must_not_overlap():
    old = random_bits(torch.int16, 400_000)
    (made,) = parts_of(
        [(old, with_changes(old, scattered(400_000, 0.01)))], max_part_bytes=1 << 16
    )
    made.check([400_000], [2])
    first, second = made.blocks()[:2]
    values = fields(made, 1)
    values[5] = first.first + first.num_elements - 1
    ROW.pack_into(made.table.numpy().data, HEADER.size + ROW.size, *values)
    with pytest.raises(Malformed, match="row 1: it is not behind the row before"):
        made.check([400_000], [2])
    assert second.first >= first.first + first.num_elements


def changed_data(section: str, row: int, offset: int, *octets: int) -> Part:
    """A part with other bytes in a section of a row."""
    made = part()
    made.check(SIZES, WIDTHS)
    at = getattr(made.blocks()[row], f"{section}_at") + offset
    made.data[at : at + len(octets)] = torch.tensor(octets, dtype=torch.uint8)
    return made


def last_code() -> int:
    made = part()
    made.check(SIZES, WIDTHS)
    return made.blocks()[0].num_codes - 1


@pytest.mark.parametrize(
    "made, words",
    [
        (changed_data("chunks", 0, 0, 1), "row 0: the table of chunks does not fit"),
        (changed_data("chunks", 0, 12, 99), "row 0: the table of chunks does not fit"),
        (changed_data("chunks", 0, 16, 99), "row 0: the table of chunks does not fit"),
        (changed_data("chunks", 0, 20, 99), "row 0: the table of chunks does not fit"),
        (changed_data("places", 0, 3, 255), "row 0: the table of chunks does not fit"),
        (changed_data("places", 0, last_code(), 254), "row 0: a place is beyond"),
        (changed_data("places", 0, last_code(), 255), "row 0: the last code"),
        (changed_data("places", 0, last_code() - 1, 255), "row 0: (fewer|a place)"),
        (changed_data("places", 1, 0, 64, 0, 4), "row 1: a place is beyond the block"),
        (changed_data("places", 1, 4, 0), "row 1: a run is empty"),
        (changed_data("places", 1, 4, 63), "row 1: fewer places than entries"),
        (changed_data("places", 1, 8, 3, 0), "row 1: a run is not behind"),
        (changed_data("places", 1, 4, 65), "row 1: more places than entries"),
        (changed_data("places", 1, 4, 255, 255, 255, 255), "row 1: a place is beyond"),
        (changed_data("places", 2, 9, 0, 0, 0), "row 2: fewer places than entries"),
        (changed_data("places", 2, 9, 255, 255), "row 2: more places than entries"),
        (changed_data("values", 1, 0, 255), "row 1: the codes of differences have"),
        (changed_data("values", 3, 7, 0), "row 3: the codes of differences have"),
    ],
)
def test_wrong_data_is_refused_with_the_row_and_the_reason(made, words):
    made.check(SIZES, WIDTHS)
    with pytest.raises(Malformed, match=words):
        delta.decode(made)


def test_a_bit_of_a_bitmap_beyond_the_block_is_refused():
    old = torch.zeros(60, dtype=torch.int8)
    places = [0, 2, 5, *range(8, 30, 2), 41, 43, 57, 59]
    (made,) = parts_of([(old, with_changes(old, places))])
    made.check([60], [1])
    (block,) = made.blocks()
    assert block.form == delta.PlaceForm.BITMAP
    made.data[block.places_at + 7] = 0b1010  # 57, and 59 as before: both places
    assert len(list(delta.decode(made))) == 1
    made.data[block.places_at + 7] = 0b10010  # 60 instead of 59
    with pytest.raises(Malformed, match="row 0: a place is beyond the block"):
        delta.decode(made)


def test_a_part_is_checked_before_it_is_used():
    with pytest.raises(ValueError, match=r"part.check"):
        part().blocks()
    with pytest.raises(ValueError, match=r"part.check"):
        delta.decode(part())
    for wrong in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8)):
        with pytest.raises(Malformed, match="no flat uint8"):
            Part(part().table, wrong)
        with pytest.raises(Malformed, match="no flat uint8"):
            Part(wrong, part().data)
    with pytest.raises(ValueError, match="a number of elements and a width"):
        part().check([1], [])


def test_a_part_without_rows_changes_nothing():
    header = HEADER.pack(b"vifdelta", 1, 0, 0, 0, 0, 0)
    empty = torch.zeros(0, dtype=torch.uint8)
    made = Part(torch.tensor(list(header), dtype=torch.uint8), empty)
    assert read(made) == []


def test_a_part_may_lie_anywhere_in_a_buffer():
    buffer = torch.zeros(100_000, dtype=torch.uint8)
    whole, at = part(), 3
    views = []
    for tensor in (whole.table, whole.data):
        views.append(buffer[at : at + len(tensor)])
        views[-1].copy_(tensor)
        at += len(tensor) + 2
    for one, other in zip(read(Part(*views)), read(whole), strict=True):
        assert torch.equal(one.places, other.places)
        assert torch.equal(one.bits, other.bits)


def test_a_table_that_changes_after_its_check_changes_nothing():
    made = part()
    made.check(SIZES, WIDTHS)
    made.table.fill_(255)
    assert len(list(delta.decode(made))) == 4


def test_random_damage_is_refused_or_stays_inside_the_tensors():
    rng = random.Random(7)
    accepted = 0
    for _ in range(3000):
        made = part()
        for _ in range(rng.randint(1, 3)):
            into = made.data if rng.random() < 0.6 else made.table
            into[rng.randrange(len(into))] = rng.choice([0, 1, 127, 128, 254, 255])
        try:
            changes = read(made)
        except Malformed:
            continue
        accepted += 1
        for each in changes:
            assert int(each.places[0]) >= 0
            assert int(each.places[-1]) < SIZES[each.number]
            assert bool((each.places[1:] > each.places[:-1]).all())
            assert each.bits.element_size() == WIDTHS[each.number]
    assert accepted > 10  # damage of values is not visible here; digests find it


# Compression


def compressed() -> Part:
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    pair = old, with_changes(old, scattered(len(old), 0.1), most=2)
    (made,) = parts_of([pair], compress=3)
    return made


def test_a_compressed_part_decodes_to_the_same_changes():
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    pair = old, with_changes(old, scattered(len(old), 0.1), most=2)
    (plain,) = parts_of([pair])
    small = compressed()
    assert small.num_bytes < plain.num_bytes
    for made in (plain, small):
        made.check([100_000], [2])
    assert torch.equal(small.plain_data(), plain.data)
    for a, b in zip(delta.decode(plain), delta.decode(small), strict=True):
        assert torch.equal(a.places, b.places) and torch.equal(a.bits, b.bits)


def test_data_that_does_not_shrink_stays_as_it_is():
    old = random_bits(torch.int64, 3)
    (made,) = parts_of([(old, with_changes(old, [1]))], compress=3)
    made.check([3], [8])
    assert torch.equal(made.plain_data(), made.data)


def frame_of(num_bytes: int, **options: object) -> torch.Tensor:
    import zstandard

    frame = zstandard.ZstdCompressor(**options).compress(bytes(num_bytes))
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def with_frame(frame: torch.Tensor) -> Part:
    table = compressed().table
    values = list(HEADER.unpack_from(table.numpy().data))
    values[-1] = len(frame)
    HEADER.pack_into(table.numpy().data, 0, *values)
    return Part(table, frame)


def test_a_frame_that_decompresses_to_another_size_is_refused_before_it_is_read():
    good = compressed()
    good.check([100_000], [2])
    size = len(good.plain_data())
    for frame, words in (
        (frame_of(1 << 32), "announces 4294967296 bytes"),
        (frame_of(size - 8), "announces"),
        (frame_of(size, write_content_size=False), "announces"),
        (frame_of(size)[:-3], "does not decompress"),
        (torch.cat((frame_of(size), frame_of(8))), "does not decompress"),
        (torch.zeros(40, dtype=torch.uint8), "does not decompress"),
        (torch.zeros(0, dtype=torch.uint8), "does not decompress"),
    ):
        made = with_frame(frame)
        made.check([100_000], [2])
        with pytest.raises(Malformed, match=words):
            delta.decode(made)


def test_a_size_that_the_rows_do_not_need_is_refused_before_decompression():
    made = compressed()
    values = list(HEADER.unpack_from(made.table.numpy().data))
    values[5] = 1 << 40
    HEADER.pack_into(made.table.numpy().data, 0, *values)
    with pytest.raises(Malformed, match="do not fill data"):
        made.check([100_000], [2])


def test_without_zstandard_the_error_says_what_to_install(monkeypatch):
    made = compressed()
    made.check([100_000], [2])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for use in (lambda: delta.Encoder(compress=3), lambda: delta.decode(made)):
        with pytest.raises(ConfigError, match="zstandard") as failed:
            use()
        assert "pip install zstandard" in failed.value.remedy


def test_compressed_changes_are_near_the_entropy_of_gaps_and_values():
    old = torch.randn(8_000_000, generator=torch.Generator().manual_seed(1))
    old = (old * 0.02).to(torch.bfloat16)
    places = scattered(len(old), 0.01)
    new = with_changes(old, places, most=2)
    parts = parts_of([(old, new)], compress=3)
    gaps = places.diff()
    differences = (new.view(torch.int16) - old.view(torch.int16))[places]
    bits = sum(entropy(each) for each in (gaps, differences))
    size = sum(made.num_bytes for made in parts)
    assert size * 8 <= 1.4 * bits * len(places)


def entropy(values: torch.Tensor) -> float:
    """Bits of each value, if values are coded one by one."""
    counts = values.unique(return_counts=True)[1].double()
    shares = counts / counts.sum()
    return float(-(shares * shares.log2()).sum())
