"""A delta file comes back as it was, opens in safetensors, and is checked when read."""

import json
import random
import struct

import pytest
import safetensors
import torch

from tests.support.deltas import parts_of, random_bits, scattered, with_changes
from vllm.inflight import delta
from vllm.inflight.errors import Malformed

METADATA = {"inflight": json.dumps({"base": "0" * 32, "names": ["a", "b"]})}


@pytest.fixture
def parts():
    olds = [random_bits(torch.bfloat16, size) for size in (300_000, 70_000)]
    pairs = [(old, with_changes(old, scattered(len(old), 0.2))) for old in olds]
    return parts_of(pairs, max_part_bytes=1 << 16)


@pytest.fixture
def file(tmp_path, parts):
    delta.save(tmp_path / "d.safetensors", parts, METADATA)
    return tmp_path / "d.safetensors"


def test_a_file_comes_back_as_it_was(file, parts):
    seen, metadata = delta.load(file)
    assert metadata == METADATA
    assert len(seen) == len(parts) > 1
    for one, other in zip(seen, parts, strict=True):
        assert torch.equal(one.table, other.table)
        assert torch.equal(one.data, other.data)
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_safetensors_itself_opens_the_file(file, parts):
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == METADATA
        assert torch.equal(opened.get_tensor("delta.1.data"), parts[1].data)
        assert len(opened.keys()) == 2 * len(parts)


def test_a_delta_of_nothing_is_a_file(tmp_path):
    delta.save(tmp_path / "empty", [], {})
    assert delta.load(tmp_path / "empty") == ([], {})


def test_a_broken_file_is_refused_by_its_name(file):
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])

    def with_header(change):
        changed = json.loads(json.dumps(header))
        change(changed)
        text = json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    wrong = [
        *(b"", whole[:4], whole[:100], whole[:-1], whole + b"\0"),
        struct.pack("<Q", 2**63) + whole[8:],
        struct.pack("<Q", 2) + b"[]",
        with_header(lambda h: h.pop("delta.0.table")),
        with_header(lambda h: h.pop(list(h)[-1])),
        with_header(lambda h: h.update(other=h["delta.0.table"])),
        with_header(lambda h: h["delta.0.data"].update(dtype="I8")),
        with_header(lambda h: h["delta.0.data"].update(shape=[1])),
        with_header(lambda h: h["delta.0.data"].update(data_offsets=[0, 2**62])),
        with_header(lambda h: h["delta.0.table"].update(data_offsets=[0, -8])),
        with_header(lambda h: h["delta.0.table"].update(data_offsets="ab")),
        with_header(lambda h: h["__metadata__"].update(inflight=1)),
        with_header(lambda h: h.update(__metadata__=[])),
    ]
    for content in wrong:
        file.write_bytes(content)
        with pytest.raises(Malformed, match=f"{file.name} cannot be read"):
            delta.load(file)
    with pytest.raises(Malformed, match="cannot be read"):
        delta.load(file.parent / "none")


def test_random_damage_of_a_file_is_refused_or_read(file):
    whole = file.read_bytes()
    rng = random.Random(3)
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(600)] = rng.randrange(256)
        file.write_bytes(data)
        try:
            delta.load(file)
        except Malformed:
            continue
