"""Which bytes travel in which bucket."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.inflight.transport.buckets.plan import extent, plan

CASES = {
    "nothing at all": ([], []),
    "a tensor without elements travels in no bucket": ([0, 0], []),
    "one byte": ([1], [[(0, 0, 0, 1)]]),
    "one-byte tensors are aligned": ([1, 1], [[(0, 0, 0, 1), (1, 0, 256, 1)]]),
    "an exact fit": ([1024], [[(0, 0, 0, 1024)]]),
    "an exact fit of two": ([256, 768], [[(0, 0, 0, 256), (1, 0, 256, 768)]]),
    "one byte too many for the rest stays whole": (
        [256, 769],
        [[(0, 0, 0, 256)], [(1, 0, 0, 769)]],
    ),
    "larger than a bucket": (
        [2500],
        [[(0, 0, 0, 1024)], [(0, 1024, 0, 1024)], [(0, 2048, 0, 452)]],
    ),
    "a large one begins in the rest, a small one follows it": (
        [300, 1500, 10],
        [
            [(0, 0, 0, 300), (1, 0, 512, 512)],
            [(1, 512, 0, 988)],
            [(2, 0, 0, 10)],
        ],
    ),
    "two buckets exactly": ([2048], [[(0, 0, 0, 1024)], [(0, 1024, 0, 1024)]]),
    "an empty one between": ([10, 0, 10], [[(0, 0, 0, 10), (2, 0, 256, 10)]]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_the_expected_bucket_plan(name):
    sizes, expected = CASES[name]
    found = [
        [(p.tensor, p.start, p.place, p.num_bytes) for p in bucket.pieces]
        for bucket in plan(sizes, 1024)
    ]
    assert found == expected


@given(
    st.lists(st.integers(0, 5000), max_size=40),
    st.integers(1, 8).map(lambda n: n * 256),
)
def test_every_byte_travels_once_aligned_and_in_order(sizes, bucket_bytes):
    buckets = plan(sizes, bucket_bytes)
    arrived = [0] * len(sizes)
    for bucket in buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.place % 256 == 0 and piece.place >= end
            assert piece.start == arrived[piece.tensor]  # no gap, nothing twice
            assert all(arrived[t] == sizes[t] for t in range(piece.tensor))
            assert piece.num_bytes > 0
            arrived[piece.tensor] += piece.num_bytes
            end = piece.place + piece.num_bytes
        assert end <= bucket_bytes
    assert arrived == sizes


@given(st.lists(st.integers(0, 5000), max_size=40))
def test_a_tensor_that_fits_into_a_bucket_is_not_split(sizes):
    pieces = [piece for bucket in plan(sizes, 2048) for piece in bucket.pieces]
    for piece in pieces:
        if sizes[piece.tensor] <= 2048:
            assert piece.num_bytes == sizes[piece.tensor]


def test_a_large_tensor_travels_alone_and_small_ones_together():
    [bucket] = plan([10, 20, 900, 30, 900, 900, 5], 8192, large=500)
    messages = [[p.tensor for p in message] for message in bucket.messages]
    assert messages == [[0, 1], [2], [3], [4], [5], [6]]
    assert extent(bucket.messages[0]) == slice(0, 256 + 20)


def test_every_piece_of_a_large_tensor_travels_alone():
    buckets = plan([1500, 10], 1024, large=500)
    assert [len(bucket.messages) for bucket in buckets] == [1, 2]


@given(st.lists(st.integers(0, 5000), max_size=40))
def test_messages_hold_every_piece_in_order(sizes):
    for bucket in plan(sizes, 2048, large=700):
        assert [p for m in bucket.messages for p in m] == bucket.pieces
        ends = [extent(message) for message in bucket.messages]
        assert all(a.stop <= b.start for a, b in pairwise(ends))
