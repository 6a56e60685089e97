"""Deltas that the ranks of a trainer find in their own shards, over gloo."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support.deltas import random_bits
from tests.support.preloaded_process import run
from vllm.inflight import ops
from vllm.inflight.errors import ConfigError
from vllm.inflight.trainer.deltas.ranks import TrainerRanks
from vllm.inflight.trainer.deltas.shard_search import (
    ShardedVersion,
    ShardReport,
    ShardSearch,
)
from vllm.inflight.trainer.sources.shards import (
    Box,
    OwnShard,
    own_shard,
    shard_digests,
)
from vllm.inflight.update import TensorSpec

WHOLE = {"first", "all", "after that busy"}
"""Updates that are sent whole at once."""
TWICE = {"lost", "rejected", "mismatch", "too many missed"}
"""Deltas that are followed by the whole version."""
FAILED = {"busy", "all, busy"}


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest, tmp_path_factory: Any) -> dict[str, Any]:
    """What became of the updates of so many ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    module = "tests.support.trainers.sharded_deltas"
    done = run(module, str(folder), str(request.param), timeout_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    refused = found.pop("without shards", None)
    if refused is not None:
        assert len(set(refused)) == 1
        assert "rank 1 of the trainer: Whole has no read_shards" in refused[0]
    if (told := found.pop("renamed", None)) is not None:
        (first, is_delta, names), (second, *more) = told
        assert first and second, "another version is served"
        assert [is_delta, *more] == [False, True, names] and names > 0
    told = found.pop("hot")
    assert [is_delta for is_delta, _ in told] == [False, True, True, True, False, True]
    shares = [share for _, share in told]
    # One layer or one rank that changes much ends no search. A sample of all does.
    assert shares[0] == 0 and all(1 < shares[n] < 1.2 for n in (1, 2, 3, 5)), shares
    assert 0 < shares[4] < 0.1, shares
    assert len(found) == {2: 3, 4: 5}[request.param]
    return found


def test_what_changed_is_served_and_nothing_else_is_sent(seen: dict[str, Any]) -> None:
    for way, rows in seen.items():
        for row in rows[:-1]:
            where = way, row["what"]
            tries = [True, False] if row["what"] in TWICE else [True]
            tries = [True, True] if row["what"] == "two missed" else tries
            tries = [False] if row["what"] in WHOLE | {"all, busy"} else tries
            assert row["tries"] == tries, where
            assert row["served"] == (row["what"] not in FAILED), where
            error = "update_in_progress" if row["what"] in FAILED else ""
            assert row["error"] == error, where


def test_as_much_is_gathered_as_has_changed(seen: dict[str, Any]) -> None:
    for way, rows in seen.items():
        of = {row["what"]: row for row in rows}
        whole = of["size"]["bytes"]
        assert of["first"]["bytes"] == whole
        assert of["nothing"]["gathered"] == 0, way
        gathered = [of[share]["gathered"] for share in ("0.01", "0.02", "0.08")]
        # Two to three bytes a change of two bytes, and a table of each rank.
        for share, num_bytes in zip((0.01, 0.02, 0.08), gathered, strict=True):
            assert 0 < num_bytes < 2 * share * whole + 3000, (way, share)
        assert gathered[2] > 2 * gathered[1] > 2 * gathered[0], way
        # What three updates of which two were missed have changed, once each.
        once = of["after two missed"]["bytes"]
        assert once < of["two missed"]["bytes"] < whole / 4, way


SIZES = [(7,), (5, 6), (4, 6), (3, 4, 5), (1, 6), (6, 1), ()]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_a_box_numbers_its_elements_as_the_whole_tensor_does(
    shape: tuple[int, ...],
) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim in range(max(1, len(shape))):
        for first, size in ((0, 1), (1, 2), (2, 5)):
            offset, extent = [0] * len(shape), list(shape)
            if shape:
                offset[dim] = min(first, shape[dim] - 1)
                extent[dim] = min(size, shape[dim] - offset[dim])
            box = Box(shape, tuple(offset), tuple(extent))
            some = numbers
            for at, (start, length) in enumerate(zip(offset, extent, strict=True)):
                some = some.narrow(at, start, length)
            found = box.places(torch.arange(box.numel))
            assert torch.equal(found, some.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_the_digest_of_a_shard_on_a_gpu_is_that_on_a_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the formula for GPUs, on the host."""
    monkeypatch.setattr("vllm.inflight.trainer.sources.shards.DIGEST_ELEMENTS", 7)
    tensor = random_bits(dtype, 5 * 9).view(5, 9)
    box = Box((11, 20), (4, 6), (5, 9))
    shard = OwnShard("a", tensor, box)
    wanted = ops.digest_slice(tensor, box.shape, box.offset)
    assert shard.first_byte is None
    assert shard.digest_by_changes() == shard_digests([shard])["a"] == wanted


@pytest.mark.parametrize(
    ("offset", "size", "first_byte"),
    [
        ((0, 0), (11, 20), 0),
        ((4, 0), (5, 20), 160),
        ((3, 0), (2, 20), 120),
        ((4, 4), (1, 9), 168),
        ((4, 0), (5, 10), None),  # no run
        ((4, 3), (1, 9), None),  # the kernel reads words of 8 bytes
    ],
)
def test_a_run_of_elements_begins_at_a_byte_of_its_tensor(
    offset: tuple[int, ...], size: tuple[int, ...], first_byte: int | None
) -> None:
    shard = OwnShard(
        "a", torch.zeros(size, dtype=torch.int16), Box((11, 20), offset, size)
    )
    assert shard.first_byte == first_byte


def reported(*boxes: Box) -> list[ShardReport]:
    digests = {"a": ops.Digest(1, 2)}
    return [ShardReport({"a": (torch.bfloat16, box)}, digests) for box in boxes]


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((4, 4), (0, 0), (2, 4))],
        [Box((4, 4), (0, 0), (3, 4)), Box((4, 4), (2, 0), (2, 4))],
        [Box((4, 4), (0, 0), (2, 4)), Box((4, 4), (1, 0), (2, 4))],
        [Box((4, 5), (0, 0), (4, 4))],
    ],
    ids=["missing", "too much", "overlap", "another tensor"],
)
def test_shards_that_do_not_make_up_their_tensor_are_named(boxes: list[Box]) -> None:
    facts = [TensorSpec("a", (4, 4), "bfloat16")]
    with pytest.raises(ConfigError, match="shards of 'a'"):
        ShardedVersion.after(None, reported(*boxes), facts)
    whole = reported(Box((4, 4), (0, 0), (2, 4)), Box((4, 4), (2, 0), (2, 4)))
    ShardedVersion.after(None, whole, facts)


def test_of_equal_shards_the_rank_with_the_least_answers() -> None:
    small, large = Box.of_all((2,)), Box.of_all((9,))
    facts = [TensorSpec("a", (9,), "int8"), TensorSpec("b", (2,), "int8")]
    boxes = {"a": (torch.int8, large), "b": (torch.int8, small)}
    digests = {"a": ops.Digest(1, 2), "b": ops.Digest(3, 4)}
    reports = [ShardReport(boxes, digests), ShardReport(boxes, digests)]
    version = ShardedVersion.after(None, reports, facts)
    assert version.left(reports) == [["b"], ["a"]]
    assert version.specs["a"].digest == digests["a"].hex()
    # A rank whose shards have moved gets none that another one has.
    again = [ShardReport(changed=[]), ShardReport(boxes, digests)]
    moved = ShardedVersion.after(version, again, facts)
    assert moved.left(again) == [[], ["a"]]
    reports[1] = ShardReport(boxes, digests | {"a": ops.Digest(1, 3)})
    with pytest.raises(ConfigError, match=r"ranks \[0, 1\] .* different values .* 'a'"):
        ShardedVersion.after(None, reports, facts)


def test_a_scrub_finds_a_kept_shard_that_has_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = ShardSearch(torch.device("cpu"), scrub_every=2)
    box = Box((6, 4), (2, 0), (3, 4))
    tensors = {name: random_bits(torch.bfloat16, 12).view(3, 4) for name in "ab"}
    shards = [OwnShard(name, tensor, box) for name, tensor in tensors.items()]
    search.keep(shards, search.find(shards), is_all=True)
    for number in range(4):
        tensors["a"].view(torch.int16)[0, 0] += 1
        report = search.find(shards)
        assert report.changed == ["a"] and report.boxes is None
        if number == 3:
            search._kept["b"].view(torch.int16)[1, 1] ^= 1
        assert not caplog.text
        search.keep(shards, report, is_all=False)
    assert "sent whole" in caplog.text and "(b)" in caplog.text
    assert search.find(shards).boxes is not None


def test_a_tensor_that_is_cut_in_another_way_is_rejected() -> None:
    tensor = torch.ones(2)
    tensor.ds_id = 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="ZeRO-3"):
        own_shard("a", tensor)


def test_shards_need_the_group_of_the_trainers_ranks() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        TrainerRanks(0)
