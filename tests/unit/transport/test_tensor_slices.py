"""Tensors that come in slices are put together, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.sliced_source import Entry, slices
from tests.support.transports.peers import (
    CPU,
    PATIENT,
    Recorder,
    connect,
    digests,
    engine,
)
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.transport.buckets.buffers import Buffers
from vllm.inflight.transport.buckets.plan import plan
from vllm.inflight.transport.buckets.reassembly import Destination, Reassembly
from vllm.inflight.transport.buckets.sender import Sender
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.buckets.tensor_slices import Shard
from vllm.inflight.transport.waiting import in_background

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def announced(entries: list[Entry]) -> TensorList:
    return TensorList(
        tuple(name for name, _, _ in entries),
        tuple(tensor.dtype for _, tensor, _ in entries),
        tuple(tuple(tensor.shape) for _, tensor, _ in entries),
        tuple(shard for _, _, shard in entries),
    )


def transfer(worker: Any, sender: Sender, entries: list[Entry]) -> None:
    """One whole update, over gloo."""
    told = announced(entries)
    pairs = [(name, tensor) for name, tensor, _ in entries]
    sending = in_background(lambda: sender.send(told, pairs, PATIENT))
    worker.receive_weights(worker.parse_update_info(told.update_info))
    sending.result(timeout=60)


def assembled(
    entries: list[Entry],
    bucket_bytes: int = 512,
    *,
    large: int = 1 << 20,
    rank: int | None = None,
    places: dict[str, torch.Tensor] | None = None,
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """What a worker makes of entries, and which of it is in its place."""
    told = announced(entries)
    buckets = plan(told.sizes, bucket_bytes, large=large)
    assembly = Reassembly(told, buckets, Buffers(0, 0, CPU), rank)
    if places is not None:
        known = places
        assembly.into(lambda name, shape, dtype: Destination.of(known[name]))
    assembly.make_room()
    sent = [tensor.reshape(-1).view(torch.uint8) for _, tensor, _ in entries]
    found: dict[str, torch.Tensor] = {}
    in_place = set()
    for bucket in buckets:
        buffer = torch.full((bucket_bytes,), 0xAA, dtype=torch.uint8)
        received = assembly.received(bucket, buffer)
        for message, target in zip(bucket.messages, received, strict=True):
            for p in message:
                start = p.place - message[0].place
                data = sent[p.tensor][p.start : p.start + p.num_bytes]
                target[start : start + p.num_bytes] = data
        for batch in assembly.complete(bucket, buffer):
            for number, data in batch:
                whole = assembly.wholes[number]
                if places and data.data_ptr() == places[whole.name].data_ptr():
                    in_place.add(whole.name)
                # A view of the memory that it came in, as a loader sees it.
                found[whole.name] = data.view(whole.dtype).view(whole.shape).clone()
    return found, in_place


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[Entry]]:
    """Tensors of any shape: cut anywhere along any dimension, or whole."""
    named: dict[str, torch.Tensor] = {}
    entries: list[Entry] = []
    for index in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        whole = torch.randint(0, 255, shape, dtype=torch.uint8).to(dtype)
        named[f"{index}"] = whole
        if draw(st.booleans()):
            entries.append((f"{index}", whole, None))
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        inside = st.integers(1, max(1, shape[dim] - 1))
        ends = sorted(draw(st.sets(inside, max_size=4))) if shape[dim] > 1 else []
        cut = slices(f"{index}", whole, dim, ends, draw(st.booleans()))
        entries += draw(st.permutations(cut))
    return named, entries


@given(cut_tensors(), st.sampled_from([256, 512, 4096]), st.sampled_from([1, 100, 999]))
def test_any_cut_in_any_order_makes_the_tensor(cut, bucket_bytes, large):
    named, entries = cut
    found, _ = assembled(entries, bucket_bytes, large=large)
    assert digests(found.items()) == digests(named.items())


@given(cut_tensors(), st.sampled_from([256, 512, 4096]), st.sampled_from([1, 100, 999]))
def test_any_cut_makes_the_tensor_in_its_place(cut, bucket_bytes, large):
    named, entries = cut
    places = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    found, in_place = assembled(entries, bucket_bytes, large=large, places=places)
    assert digests(found.items()) == digests(named.items())
    assert digests((n, places[n]) for n in in_place) == digests(
        (n, named[n]) for n in in_place
    )
    if large == 1:
        assert in_place == named.keys()


@given(cut_tensors())
def test_a_tensor_slice_round_trips_through_plain_data(cut):
    _, entries = cut
    told = announced(entries)
    again = TensorList.parse(**told.update_info)
    assert again.wholes() == told.wholes()


def test_slices_longer_than_buckets_and_many_tensors_in_one():
    big = torch.randn(7, 600)
    small = {f"{i}": torch.randn(3, 4) for i in range(9)}
    entries = slices("big", big, 1, [1, 300])
    for name, tensor in small.items():
        entries += slices(name, tensor, 1, [2])[::-1]
    found, _ = assembled(entries, 4096)
    assert digests(found.items()) == digests({"big": big, **small}.items())


def test_many_tensors_of_one_bucket_are_put_together_in_two_buffers():
    worker = engine(size=2)
    sender = connect(worker)
    addresses: set[int] = set()

    class Watcher(Recorder):
        def load_weights(self, weights):
            for name, tensor in weights:
                self.loaded[name] = tensor.clone()
                addresses.add(tensor.data_ptr())

    worker.model = Watcher()
    named = {f"{i}": torch.randn(3, 4) for i in range(7)}
    entries = [e for n, t in named.items() for e in slices(n, t, 1, [2])]
    transfer(worker, sender, entries)
    assert digests(worker.model.loaded.items()) == digests(named.items())
    assert len(addresses) == 2
    sender.group.close()
    worker.shutdown()


def test_a_worker_takes_its_own_copy_of_a_slice_that_several_ranks_send():
    whole = torch.arange(12.0).reshape(4, 3)
    told = [
        ("w", whole[:2] + 100 * rank, Shard(dim=0, start=0, size=4, rank=rank))
        for rank in (0, 1)
    ]
    told.append(("w", whole[2:], Shard(dim=0, start=2, size=4, rank=3)))
    for rank, offset in {0: 0, 1: 100, 2: 0}.items():
        found, _ = assembled(told, rank=rank)
        assert torch.equal(found["w"][:2], whole[:2] + offset)
        assert torch.equal(found["w"][2:], whole[2:])


def test_slices_for_another_rank_are_not_read():
    """Its bytes arrive, and no copy of them is made."""
    told = announced(
        [
            ("norm", torch.zeros(8), Shard(dim=0, start=0, size=8, rank=rank))
            for rank in (0, 1)
        ]
    )
    buckets = plan(told.sizes, 512)
    assembly = Reassembly(told, buckets, Buffers(0, 0, CPU), rank=1)
    assembly.make_room()
    buffer = torch.empty(512, dtype=torch.uint8)
    [[(_, data)]] = assembly.complete(buckets[0], buffer)
    assert data.data_ptr() == buffer.data_ptr() + buckets[0].pieces[1].place


def shard(start: int, **changes: int) -> dict[str, int]:
    return {"dim": 0, "start": start, "size": 4} | changes


@pytest.mark.parametrize(
    ("shapes", "shards", "named"),
    [
        ([[2], [1]], [shard(0), shard(3)], r"no slice has \[2, 3\) of dim 0"),
        ([[2], [1]], [shard(2), shard(1)], r"no slice has \[0, 1\) of dim 0"),
        ([[2], [1]], [shard(0), shard(2)], r"no slice has \[3, 4\) of dim 0"),
        ([[3], [2]], [shard(0), shard(2)], "slices overlap at 2 of dim 0"),
        ([[4], [1]], [shard(0), shard(3)], "slices overlap at 3 of dim 0"),
        ([[4], [4]], [shard(0), shard(0)], "slices overlap at 0 of dim 0"),
        ([[4], [4]], [shard(0, rank=1), shard(0, rank=1)], "slices overlap at 0"),
        ([[4], [4]], [shard(0, rank=1), shard(0)], "slices overlap at 0"),
        ([[3], [2]], [shard(0), shard(3)], r"\[3, 5\) is outside dim 0, of 4"),
        ([[2], [2]], [shard(0), shard(2, dim=1)], "there is no dim 1"),
        ([[2], [2]], [shard(0), shard(2, size=5)], r"not of one tensor but of \[4\]"),
        ([[2, 3], [2, 4]], [shard(0), shard(2)], r"of \[4, 3\] .*, \[4, 4\]"),
        ([[4], [0]], [shard(0), shard(4)], "no elements; leave that out"),
    ],
)
def test_slices_that_are_not_a_tensor_are_rejected_by_name(shapes, shards, named):
    with pytest.raises(WeightsMismatch, match=named) as refused:
        TensorList.parse(["up", "up"], ["float32"] * 2, shapes, shards)
    assert refused.value.tensors == ["up"]
    assert "'up'" in str(refused.value)


def test_slices_of_several_dtypes_are_rejected_by_name():
    with pytest.raises(WeightsMismatch, match=r"'up'.*bfloat16.*float32"):
        TensorList.parse(
            ["up", "up"], ["float32", "bfloat16"], [[2], [2]], [shard(0), shard(2)]
        )


def test_slices_interleaved_with_another_tensor_are_rejected_by_name():
    names = ["up", "down", "up"]
    told = [shard(0), None, shard(2)]
    with pytest.raises(WeightsMismatch, match=r"'up'.*do not follow one another"):
        TensorList.parse(names, ["float32"] * 3, [[2], [9], [2]], told)


@pytest.mark.parametrize(
    ("given_shards", "named"),
    [
        ("null", "'shards' must be a list"),
        ([None, None], "'shards' has 2 entries"),
        ([7], "'up': a shard is null or has dim"),
        ([{"dim": 0, "start": 0}], "'up': a shard is null or has dim"),
        ([shard(0, colour=1)], "'up': a shard is null or has dim"),
        ([shard(-1)], "'up': a shard's start cannot be -1"),
        ([shard(0) | {"size": 4.0}], "'up': a shard's size cannot be 4.0"),
        ([shard(0) | {"dim": None}], "'up': a shard's dim cannot be None"),
        ([shard(0) | {"rank": True}], "'up': a shard's rank cannot be True"),
    ],
)
def test_an_invalid_slice_is_rejected_by_name(given_shards, named):
    with pytest.raises(ValueError, match=named):
        TensorList.parse(["up"], ["float32"], [[4]], given_shards)


def test_a_slice_for_a_missing_rank_is_rejected_by_name_before_any_transfer():
    worker = engine(size=2)
    told = announced(slices("up", torch.zeros(4, 2), 0, [1, 2], ranks=True))
    with pytest.raises(WeightsMismatch, match=r"'up': a slice is of rank 2, .* has 2"):
        worker.receive_weights(worker.parse_update_info(told.update_info))


def test_a_worker_receives_slices_over_gloo():
    worker = engine(Recorder(), rank=0, size=2)
    sender = connect(worker)
    named = {"column": torch.randn(50, 40), "row": torch.randn(30, 70)}
    entries = slices("column", named["column"], 0, [24], ranks=True)
    entries += slices("row", named["row"], 1, [35], ranks=True)
    transfer(worker, sender, entries)
    assert digests(worker.model.loaded.items()) == digests(named.items())
    sender.group.close()
    worker.shutdown()


def test_a_kept_small_tensor_keeps_no_larger_buffer():
    scratch = Buffers(2, 4096, CPU)
    held = [scratch.take(number, 16)[:16] for number in range(6)]
    whole = {h.untyped_storage().data_ptr(): h.untyped_storage().nbytes() for h in held}
    assert sorted(whole.values()) == [16] * 4 + [4096] * 2
    assert len(scratch.take(6)) == 4096
