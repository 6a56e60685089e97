"""The digest of changes: digest(new) = digest(old) + digest of the changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.deltas import DTYPES, integers, random_bits, with_changes
from vllm.inflight import ops
from vllm.inflight.ops import Digest, digest, digest_of_changes, digest_slice
from vllm.inflight.ops.reference import reference_changes


def changes(old, new):
    """(places, old bits, new bits, width) of what differs."""
    before, now = integers(old), integers(new)
    places = (before != now).nonzero().squeeze(1)
    return places, before[places], now[places], old.element_size()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 7, 64, 1001, 70_001])
def test_the_digest_of_the_changes_leads_from_the_old_digest_to_the_new(dtype, size):
    old = random_bits(dtype, size)
    new = with_changes(old, range(0, size, 3))
    found = changes(old, new)
    sums = digest_of_changes(*found)
    assert digest([old])[0] + sums == digest([new])[0]
    assert Digest(*reference_changes(*found)) == sums
    assert digest_of_changes(*found, num_threads=3) == sums
    undone = (found[0], found[2], found[1], found[3])
    assert sums + digest_of_changes(*undone) == Digest.ZERO


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 2**41), unique=True, max_size=20),
    st.integers(0, 99),
)
@settings(deadline=None)
def test_places_of_any_page_of_keys_count(width, places, seed):
    places = torch.tensor(sorted(places)).long()
    integer = ops.INTEGERS[width]
    old, new = (random_bits(integer, len(places), seed + i) for i in (0, 1))
    sums = digest_of_changes(places, old, new, width)
    assert Digest(*reference_changes(places, old, new, width)) == sums
    wanted = Digest.ZERO
    for place, before, now in zip(places.tolist(), old, new, strict=True):
        wanted += digest_slice(now.view(1), (2**42,), (place,))
        wanted -= digest_slice(before.view(1), (2**42,), (place,))
    assert sums == wanted


def test_changes_that_do_not_fit_are_refused():
    places, bits = torch.arange(3), torch.zeros(3, dtype=torch.bfloat16)
    for wrong in (
        (places.int(), bits, bits, 2),
        (places, bits[:2], bits, 2),
        (places, bits, bits, 4),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            digest_of_changes(*wrong)
    with pytest.raises(ValueError, match="num_threads"):
        digest_of_changes(places, bits, bits, 2, num_threads=0)
