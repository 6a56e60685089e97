"""From version spans to one version for each token."""

from __future__ import annotations

import pytest

from vllm.inflight.errors import Malformed
from vllm.inflight.outputs.spans import VersionSpan
from vllm.inflight.trainer import per_token_versions

DICTS = [
    {"version": "a", "epoch": 1, "start": 0, "end": 2},
    {"version": "b", "epoch": 2, "start": 2, "end": 3},
]
OBJECTS = [VersionSpan("a", 0, 2, 1), VersionSpan("b", 2, 3, 2)]


@pytest.mark.parametrize("spans", [DICTS, OBJECTS])
def test_every_token_has_its_version(spans):
    assert per_token_versions(spans) == ["a", "a", "b"]
    assert per_token_versions(spans, 3) == ["a", "a", "b"]


def test_a_list_has_the_length_that_is_asked_for():
    assert per_token_versions(DICTS, 4) == ["a", "a", "b", None]
    assert per_token_versions(DICTS, 2) == ["a", "a"]


def test_a_token_that_no_span_covers_has_no_version():
    assert per_token_versions(DICTS[1:]) == [None, None, "b"]
    assert per_token_versions([]) == []
    assert per_token_versions(None, 2) == [None, None]


@pytest.mark.parametrize("spans", [DICTS[::-1], [{"version": "a"}], ["a"], [{}]])
def test_invalid_version_spans_are_rejected(spans):
    with pytest.raises(Malformed):
        per_token_versions(spans)
