"""The test vectors of docs/delta-format.md come out of the code."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.deltas import applied, parts_of
from tests.unit.delta.test_codec import reference_part
from vllm.inflight.delta import Part, PlaceForm
from vllm.inflight.delta.compression import decompress
from vllm.inflight.delta.part import HEADER, ROW
from vllm.inflight.ops import INTEGERS

PAGE = (Path(__file__).parents[3] / "docs" / "delta-format.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (.*:.*) \|$", PAGE, re.MULTILINE)

FLAGS, NUM_BYTES, NUM_STORED = 2, 5, 6
"""Fields of a header, by their number."""
FORMS = {form.name.lower() for form in PlaceForm}


def octets(vector: str, what: str) -> torch.Tensor:
    """The bytes of a vector's table or data."""
    digits = re.search(rf"^{vector} {what}\n((?:  [0-9a-f]+\n)+)", PAGE, re.MULTILINE)[
        1
    ]
    return torch.tensor(list(bytes.fromhex("".join(digits.split()))), dtype=torch.uint8)


def tensors(width: str, size: str, changes: str) -> tuple[torch.Tensor, torch.Tensor]:
    old = (torch.arange(int(size)) * 257).to(INTEGERS[int(width)])
    new = old.clone()
    for change in changes.split(", "):
        place, step = change.split(": ")
        new[int(place)] += int(step)
    return old, new


def vector_of(name: str) -> Part:
    return Part(octets(name, "table"), octets(name, "data"))


def plain(part: Part) -> Part:
    """A part with its data as before compression."""
    header = list(HEADER.unpack(bytes(part.table[: HEADER.size].tolist())))
    if not header[FLAGS]:
        return part
    data = decompress(part.data, header[NUM_BYTES])
    header[FLAGS], header[NUM_STORED] = 0, header[NUM_BYTES]
    table = part.table.clone()
    table[: HEADER.size] = torch.tensor(list(HEADER.pack(*header)), dtype=torch.uint8)
    return Part(table, data)


def test_the_page_has_vectors_of_every_form_and_width_with_exceptions_and_compression():
    blocks = {}
    for name, width, size, _ in ROWS:
        vector = vector_of(name)
        vector.check([int(size)], [int(width)])
        (blocks[name],) = vector.blocks()
    assert {form.name.lower(): int(form) for form in PlaceForm} == {
        name: block.form for name, block in blocks.items() if name in FORMS
    }
    assert {block.width for block in blocks.values()} == {1, 2, 4, 8}
    assert {block.code_bytes for block in blocks.values()} == {0, 1, 2}
    exceptions = {n: b.num_exceptions for n, b in blocks.items() if b.num_exceptions}
    assert exceptions == {"gaps8": 1, "codes16": 2}
    assert plain(vector_of("compressed")).table.tolist()[12] == 0
    assert vector_of("compressed").table.tolist()[12] == 1


@pytest.mark.parametrize(("name", "width", "size", "changes"), ROWS)
def test_writer_reference_and_reader_produce_the_vectors_of_the_page(
    name, width, size, changes
):
    old, new = tensors(width, size, changes)
    vector = vector_of(name)
    for made in (*parts_of([(old, new)]), reference_part([(old, new)])):
        assert torch.equal(made.table, plain(vector).table)
        assert torch.equal(made.data, plain(vector).data)
    (compressed,) = parts_of([(old, new)], compress=3)
    for part in (vector, compressed):
        (seen,) = applied([part], [old])
        assert torch.equal(seen, new)


@pytest.mark.parametrize("header, form", [("### Header", HEADER), ("### Rows", ROW)])
def test_the_fields_of_the_page_follow_one_another(header, form):
    table = PAGE.split(header)[1].split("###")[0]
    fields = re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE)
    end = 0
    for offset, size in fields:
        assert int(offset) == end
        end += int(size)
    assert end == form.size
