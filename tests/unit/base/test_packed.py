"""Packed values are unchanged, and packing blocks a thread for a short time only."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.inflight import packed
from vllm.inflight.errors import Malformed
from vllm.inflight.packed import (
    MARK,
    Work,
    at_once,
    blocks,
    is_packed,
    length,
    pack,
    resting,
    unpack,
)
from vllm.inflight.update import Manifest, fingerprint

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6)
    ),
)
NUM = 20_000
SLOWEST_S = 0.05
"""Of a slice, in time of this thread: several times what is wanted, on any machine."""


def tensors(count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"model.layers.{i // 300}.mlp.experts.{i}.gate_proj.weight",
            "shape": [2048, 768],
            "dtype": "bfloat16",
            "digest": f"{i:032x}",
        }
        for i in range(count)
    ]


def slowest(work: Work[Any]) -> tuple[Any, float, int]:
    """(result, seconds of the longest slice, number of slices) of some work."""
    longest, count = 0.0, 0
    gc.disable()  # what a collection costs depends on all that the process has
    try:
        while True:
            began = time.thread_time()
            try:
                next(work)
            except StopIteration as stop:
                return stop.value, max(longest, time.thread_time() - began), count + 1
            longest, count = max(longest, time.thread_time() - began), count + 1
    finally:
        gc.enable()


@given(PLAIN, st.integers(1, 3))
def test_packing_and_unpacking_changes_nothing(value, size):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packed, "BLOCK", size)
        there = at_once(pack(value))
        msgspec.msgpack.encode(there)  # so it can be sent
        # As deep as lists were packed; what lies deeper is as it was.
        assert at_once(unpack(there, 8)) == value


def test_only_long_lists_are_packed_into_bytes():
    value = {
        "names": ["a"] * 3000,
        "few": ["b"],
        "by": {str(i): i for i in range(2000)},
    }
    there = at_once(pack(value))
    assert is_packed(there["names"]) and is_packed(there["by"])
    assert there["few"] == ["b"]
    assert (length(there["names"]), length(there["few"])) == (3000, 1)
    assert sum(map(len, blocks(there["by"]))) == 2000
    assert at_once(unpack(there)) == value
    assert at_once(pack(there)) == there


def test_a_list_that_cannot_be_sent_is_not_changed():
    for entry in (object(), (1, 2), "\ud800"):
        value = {"handles": [entry] * 3000}
        assert at_once(pack(value))["handles"] == value["handles"]


def test_a_json_body_cannot_pass_for_packed_data():
    claimed = {MARK: ["YWJj"], "kind": "list", "length": 1}
    for claims in (claimed, claimed | {MARK: []}):
        assert not is_packed(json.loads(json.dumps(claims)))
    manifest = {"format": 1, "tensors": [{"name": 1}], "\0checked": "yes"}
    with pytest.raises(Malformed, match="tensor #0"):
        at_once(Manifest.packed(manifest))


def test_unpacking_rests_between_slices():
    rests: list[None] = []
    there = at_once(pack(["a"] * 5000))
    assert resting(unpack(there), lambda: rests.append(None)) == ["a"] * 5000
    assert len(rests) == 5


def test_packing_a_manifest_blocks_for_a_short_time_only():
    body = {"format": 1, "tensors": tensors(NUM), "name_map": {}}
    there, longest, count = slowest(Manifest.packed(body))
    assert (longest < SLOWEST_S, count > 20) == (True, True)
    manifest, longest, count = slowest(Manifest.unpacked(there))
    assert (longest < SLOWEST_S, count > 15) == (True, True)
    assert len(manifest.tensors) == NUM
    assert manifest == Manifest.parse(body)
    assert manifest.tensors[tensors(1)[0]["name"]].digest == "0" * 32


def test_the_fingerprint_of_a_packed_manifest_depends_on_its_contents():
    def of(entries: list[Any], **more: Any) -> str:
        body = {"format": 1, "tensors": entries} | more
        return fingerprint({"manifest": at_once(Manifest.packed(body))})

    entries = tensors(3000)
    turned = [dict(reversed(entry.items())) for entry in entries]
    assert of(entries) == of(turned)
    assert of(entries) != of(entries[:-1])
    assert of(entries) != of([*entries[:-1], entries[-1] | {"shape": [1]}])
    assert of(entries) != of(entries, step=1)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_a_manifest_is_checked_whether_its_lists_came_packed_or_not(count):
    body = {"format": 1, "tensors": tensors(count)}
    body["name_map"] = {f"module.{i}": str(i) for i in range(count)}
    body["config"] = {f"key{i}": i for i in range(count)}
    half = {"name": "\ud800", "shape": [1], "dtype": "int8"}
    came = at_once(pack(body))
    assert is_packed(came.get("tensors")) is (count > 1024)
    assert Manifest.parse(came) == Manifest.parse(body)
    for spoilt, named in (
        ({"tensors": [*body["tensors"], {"name": 3}]}, f"tensor #{count}"),
        ({"tensors": [*tensors(count + 1), *tensors(count + 1)]}, "twice"),
        ({"name_map": body["name_map"] | {"a": 1}}, "must map names"),
        ({"name_map": body["name_map"] | {"a": "0", "b": "0"}}, "maps two"),
        ({"tensors": {str(i): i for i in range(count)} or {}}, "must be a list"),
        ({"name_map": [1] * max(1, count)}, "must map names"),
        ({"subset": ["*"] * 1500}, "1 to 1024 patterns"),
        ({"tensors": [*body["tensors"], half]}, "no text"),
    ):
        with pytest.raises(Malformed, match=named):
            Manifest.parse(at_once(pack(body | spoilt)))
