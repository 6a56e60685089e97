"""The test vectors of docs/delta-format.md come out of the code."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.deltas import applied, parts_of
from tests.unit.delta.test_codec import reference_part
from vllm.inflight.delta import Part, PlaceForm
from vllm.inflight.delta.part import HEADER, ROW

PAGE = (Path(__file__).parents[3] / "docs" / "delta-format.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (\d+) \| (.*:.*) \|$", PAGE, re.MULTILINE)


def octets(vector: str, what: str) -> torch.Tensor:
    """The bytes of a vector's table or data."""
    digits = re.search(rf"^{vector} {what}\n((?:  [0-9a-f]+\n)+)", PAGE, re.MULTILINE)[
        1
    ]
    return torch.tensor(list(bytes.fromhex("".join(digits.split()))), dtype=torch.uint8)


def tensors(size: str, changes: str) -> tuple[torch.Tensor, torch.Tensor]:
    old = (torch.arange(int(size)) * 257).to(torch.int16)
    new = old.clone()
    for change in changes.split(", "):
        place, step = change.split(": ")
        new[int(place)] += int(step)
    return old, new


def test_the_page_has_a_vector_of_every_form_of_places():
    assert [PlaceForm[name.upper()] for name, *_ in ROWS] == list(PlaceForm)


@pytest.mark.parametrize("name, size, changes", ROWS)
def test_writer_reference_and_reader_produce_the_vectors_of_the_page(
    name, size, changes
):
    old, new = tensors(size, changes)
    vector = Part(octets(name, "table"), octets(name, "data"))
    for made in (*parts_of([(old, new)]), reference_part([(old, new)])):
        assert torch.equal(made.table, vector.table)
        assert torch.equal(made.data, vector.data)
    (seen,) = applied([vector], [old])
    assert torch.equal(seen, new)
    (block,) = vector.blocks()
    assert PlaceForm(block.form) is PlaceForm[name.upper()]


@pytest.mark.parametrize("header, form", [("### Header", HEADER), ("### Rows", ROW)])
def test_the_fields_of_the_page_follow_one_another(header, form):
    table = PAGE.split(header)[1].split("###")[0]
    fields = re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE)
    end = 0
    for offset, size in fields:
        assert int(offset) == end
        end += int(size)
    assert end == form.size
