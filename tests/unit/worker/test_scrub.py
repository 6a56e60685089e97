"""A scrub: the digests that ranks read from live weights, added up and compared."""

import threading
from array import array
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.support.models.every_loader import MAPPED, Model, version
from tests.support.shadow_on_host import InPlace, Sets
from tests.support.triton_interpreter import succeeds
from vllm.inflight import ops
from vllm.inflight.engine.integrity.scrubs import judged
from vllm.inflight.ops.reference import row_major
from vllm.inflight.worker.integrity import scrub
from vllm.inflight.worker.integrity.scrub import Reading, Scratch, Sums
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.staging.worker import Versions

HOST = torch.device("cpu")


@st.composite
def parts(draw: Any) -> tuple[torch.Tensor, list[tuple[torch.Tensor, Any]]]:
    """A tensor, and disjoint parts that make it up, as they may lie elsewhere."""
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 9)) for _ in range(dims)]
    dtype = draw(st.sampled_from([torch.int8, torch.int16, torch.int32, torch.int64]))
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    whole = torch.randint(-100, 100, shape, dtype=dtype)
    dim = draw(st.integers(0, dims - 1))
    cut = draw(st.integers(0, shape[dim]))
    strides = row_major(shape)
    made = []
    for at, size in ((0, cut), (cut, shape[dim] - cut)):
        view = whole.narrow(dim, at, size)
        order = draw(st.permutations(range(dims)))
        part = (
            at * strides[dim],
            tuple(view.shape[d] for d in order),
            tuple(strides[d] for d in order),
        )
        # As it is served: in memory of another order, behind something else.
        there = torch.empty(3 + view.numel(), dtype=dtype)[3:]
        there = there.view([view.shape[d] for d in order])
        there.copy_(view.permute(order))
        made.append((there, part))
    return whole, made


def values(digest: ops.Digest, tensor: torch.Tensor) -> ops.Digest:
    shape, width = tuple(tensor.shape), tensor.element_size()
    return digest - ops.counts_of_part(shape, row_major(shape), 0, width)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(parts())
def test_the_digests_of_parts_add_up_to_the_digest_of_the_whole(made):
    whole, pieces = made
    sums, reading = Sums(HOST, 1), Reading(Scratch(HOST))
    for tensor, part in pieces:
        reading.add(0, tensor, part, tensor.dtype)
    reading.run(sums)
    found = ops.Digest(*(n % 2**64 for n in sums.results()[0].tolist()))
    assert found == values(ops.digest([whole])[0], whole)


def check_kernel() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    scrub.PIECE_BYTES = 1024
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.int8):
        whole = (torch.randn(24, 40) * 50).to(dtype)
        cases = {
            "rows": [
                (whole[:8], (0, (8, 40), (40, 1))),
                (whole[8:], (320, (16, 40), (40, 1))),
            ],
            "columns": [
                (whole[:, :7].clone(), (0, (24, 7), (40, 1))),
                (whole[:, 7:].clone(), (7, (24, 33), (40, 1))),
            ],
            "turned": [(whole.t().contiguous(), (0, (40, 24), (1, 40)))],
            "every second": [
                (whole[:, ::2].clone(), (0, (24, 20), (40, 2))),
                (whole[:, 1::2].clone(), (1, (24, 20), (40, 2))),
            ],
        }
        for name, pieces in cases.items():
            for is_dense_allowed in (True, False):
                sums, reading = Sums(HOST, 2), Reading(Scratch(HOST))
                for tensor, part in pieces:
                    if not (is_dense_allowed and reading._add_dense(1, tensor, part)):
                        reading._add_scattered(1, tensor, part, dtype)
                reading.close()
                reading.run(sums)
                rows = sums.results()
                found = ops.Digest(*(n % 2**64 for n in rows[1].tolist()))
                assert found == values(ops.digest([whole])[0], whole), (name, dtype)
                assert not rows[0].any()


@pytest.mark.seconds
def test_the_gpu_kernel_of_the_scrub_equals_the_cpu():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:check_kernel")


def test_every_kind_of_loader_that_copies_is_read_back():
    with Arena.open(HOST, 1 << 26) as arena:
        sets = Sets(arena, kind=Model, first=version(0))
        sets.shadow.asks_loader = True
        for seed in (1, 2, 3):
            sets.stage(InPlace(version(seed)))
            sets.stager.flip()
        found = sets.stager.scrub("begin")
        assert found == 1
        result = sets.stager.scrub("result")
        told = judged([result])
        # What lost bits on its way, or is there many times over, is no copy.
        copied = MAPPED - {"narrowed", "spread"}
        assert set(result["names"]) >= copied
        assert told["result"] == "equal"
        assert told["num_tensors"] == len(copied)
        assert told["num_parameters"] > 0
        assert (told["unknown"], told["different"]) == ([], [])
        for name in ("turned", "experts", "computed", "padded"):
            param = sets.live.get_parameter(name)
            param.data.view(-1).view(torch.int32)[-1] ^= 1
            sets.stager.scrub("begin")
            found = judged([sets.stager.scrub("result")])
            expected = {"experts": "experts.2"}.get(name, name)
            assert found["different"] == [expected]
            param.data.view(-1).view(torch.int32)[-1] ^= 1


def test_a_flip_during_a_scrub_ends_the_scrub_without_a_result():
    with Arena.open(HOST, 1 << 26) as arena:
        sets = Sets(arena, kind=Model, first=version(0))
        sets.shadow.asks_loader = True
        for seed in (1, 2):
            sets.stage(version(seed).items())
            sets.stager.flip()
        sets.stager.scrub("begin")
        sets.stager.flip("before")
        assert sets.stager.scrub("slice") is None
        assert sets.stager.scrub("result") is None


def test_a_scrub_that_ends_while_a_version_is_staged_loses_neither(monkeypatch):
    """Else the commit brings the old version back, under the label of the new one."""
    replace = Versions._replace
    with Arena.open(HOST, 1 << 26) as arena:
        sets = Sets(arena, kind=Model, first=version(0))
        sets.shadow.asks_loader = True
        sets.stage(version(1).items())
        sets.stager.flip()
        del sets.stager.versions.served.marks["computed"]
        stages = threading.Thread(target=lambda: sets.stage(version(2).items()))

        def interrupted(self: Versions, **held: Any) -> Versions:
            made = replace(self, **held)
            if "served" in held:
                stages.start()
                stages.join(1.0)
            return made

        monkeypatch.setattr(Versions, "_replace", interrupted)
        sets.stager.scrub("begin")
        sets.stager.scrub("result")
        stages.join()
        assert "computed" in sets.stager.versions.served.marks
        for _ in range(2):
            with suppress(RuntimeError):  # the second time nothing is staged
                sets.stager.flip()
            expected = Model(torch.zeros)
            expected.load_weights(version(2).items())
            for name, param in expected.named_parameters():
                assert torch.equal(sets.live.get_parameter(name), param), name
        with pytest.raises(RuntimeError, match="nothing is staged"):
            sets.stager.flip()


def test_an_error_while_a_slice_is_read_is_no_difference(monkeypatch):
    def fail(*_: Any) -> set[str]:
        raise AttributeError("a layer lacks what is read")

    with Arena.open(HOST, 1 << 26) as arena:
        sets = Sets(arena, kind=Model, first=version(0))
        sets.shadow.asks_loader = True
        sets.stage(version(1).items())
        sets.stager.flip()
        sets.stager.scrub("begin")
        with monkeypatch.context() as broken:
            broken.setattr(scrub.ScrubSlice, "read", fail)
            sets.stager.scrub("slice")  # nobody reads the reply to this call
        with pytest.raises(AttributeError, match="a layer lacks"):
            sets.stager.scrub("result")
        sets.stager.scrub("begin")
        assert judged([sets.stager.scrub("result")])["different"] == []


def test_a_parameter_that_staging_left_out_is_compared_with_its_first_reading():
    """As a packed weight of the CPU build that its loader computes."""
    with Arena.open(HOST, 1 << 26) as arena:
        sets = Sets(arena, kind=Model, first=version(0))
        sets.shadow.asks_loader = True
        sets.stage(version(1).items())
        sets.stager.flip()
        del sets.stager.versions.served.marks["computed"]
        for unknown, different in ((["computed"], []), ([], []), ([], ["computed"])):
            sets.stager.scrub("begin")
            told = judged([sets.stager.scrub("result")])
            assert (told["unknown"], told["different"]) == (unknown, different)
            if not unknown:
                param = sets.live.get_parameter("computed")
                param.data.view(-1).view(torch.int32)[-1] ^= 1


def test_the_scrub_after_one_that_a_flip_ended_reads_what_the_flip_left_live():
    with Arena.open(HOST, 1 << 26) as arena:
        sets = Sets(arena, kind=Model, first=version(0))
        sets.shadow.asks_loader = True
        for seed in (1, 2, 3):
            sets.stage(InPlace(version(seed)))
            sets.stager.flip()
        sets.stager.scrub("begin")
        sets.stager.flip("before")
        for expected in ([], ["computed", "whole"]):
            assert sets.stager.scrub("begin") == 1
            told = judged([sets.stager.scrub("result")])
            assert told["different"] == expected
            # A copy is compared with what was sent, and the other with what was staged.
            assert told["num_tensors"] > 0 and told["num_parameters"] > 0
            for name in ("computed", "whole"):
                param = sets.live.get_parameter(name)
                param.data.view(-1).view(torch.int32)[-1] ^= 1


def test_a_reader_during_the_slicing_reads_all_slices(monkeypatch):
    """The thread that stages makes them, and the one that decodes may ask then."""
    is_making, goes_on = threading.Event(), threading.Event()

    class Slow(scrub.ScrubSlice):
        def add(self, *args: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                is_making.set()
                goes_on.wait(30)
            super().add(*args)

    with Arena.open(HOST, 1 << 26) as arena:
        sets = Sets(arena, kind=Model, first=version(0))
        sets.shadow.asks_loader = True
        monkeypatch.setattr(scrub, "ScrubSlice", Slow)
        staging = threading.Thread(
            target=lambda: sets.stage(version(1).items()), daemon=True
        )
        staging.start()
        assert is_making.wait(30)
        assert sets.stager.scrub("begin") is None, "decoding does not wait for it"
        layout = sets.stager._layout
        asked = layout.slices(set())
        goes_on.set()
        staging.join()
        num_places = len(layout.places)
        assert sum(len(each._of_host) for each in asked) == num_places
        assert sum(len(e._of_host) for e in layout.slices(set())) == num_places
        assert sets.stager.scrub("begin") == len(asked)


Held = tuple[torch.Tensor, *tuple[tuple[torch.Tensor, int], ...]]
"""A whole tensor, and the rows that are held, each from a first one on."""


def reply(held: dict[str, Held]) -> dict[str, Any]:
    """Of a rank that holds these parts of each whole tensor."""
    keys = ("expected", "numel", "owners", "parts", "sums", "covered")
    found = {key: array("Q") for key in keys}
    names = sorted(held)
    for number, name in enumerate(names):
        whole, *parts = held[name]
        found["expected"].extend(values(ops.digest([whole])[0], whole))
        found["numel"].append(whole.numel())
        for part, first in parts:
            offsets = (first, *(0 for _ in part.shape[1:]))
            shape, width = tuple(part.shape), part.element_size()
            strides = row_major(whole.shape)
            start = first * strides[0]
            count = ops.counts_of_part(shape, strides, start, width)
            found["owners"].append(number)
            found["parts"].append(hash((name, start, shape)) % 2**64)
            sums = ops.digest_slice(part, whole.shape, offsets)
            found["sums"].extend(sums - count)
            found["covered"].append(part.numel())
    packed = {key: numbers.tobytes() for key, numbers in found.items()}
    lists = {key: list[str]() for key in ("wrong", "inexact", "unknown")}
    return packed | lists | {"names": names, "num_marked": 0}


def test_a_scrub_adds_up_shards_and_requires_equal_copies():
    whole, norm = torch.randn(8, 4), torch.randn(4)
    shards = [
        {"w": (whole, (whole[at : at + 4], at)), "n": (norm, (norm, 0))}
        for at in (0, 4)
    ]
    told = judged([reply(held) for held in shards])
    assert (told["result"], told["num_tensors"]) == ("equal", 2)
    shards[1]["n"] = (norm, (norm + 1, 0))
    assert judged([reply(held) for held in shards])["different"] == ["n"]
    shards[1]["n"] = (norm, (norm, 0))
    shards[1]["w"] = (whole, (whole[:4], 4))
    assert judged([reply(held) for held in shards])["different"] == ["w"]
    # Both hold the first half: nobody has the second.
    shards[1]["w"] = (whole, (whole[:4], 0))
    told = judged([reply(held) for held in shards])
    assert (told["result"], told["unknown"]) == ("equal", ["w"])


def test_a_tensor_that_was_not_read_with_all_of_its_bits_is_not_called_different():
    whole, norm = torch.randn(8, 4), torch.randn(4)
    held = {"w": (whole, (whole + 1, 0)), "n": (norm, (norm + 1, 0))}
    told = judged([reply(held) | {"inexact": ["w"]}])
    assert (told["result"], told["different"]) == ("different", ["n"])
    assert (told["unknown"], told["num_tensors"]) == (["w"], 1)
    held = {"w": (whole, (whole, 0)), "n": (norm, (norm, 0))}
    told = judged([reply(held) | {"inexact": ["w"]}])
    assert (told["result"], told["unknown"], told["num_tensors"]) == ("equal", [], 2)


def test_a_scrub_counts_a_part_that_all_ranks_have_beside_shards_once():
    """As Mamba's: heads are shared out, and one group of B and C is on all ranks."""
    whole = torch.randn(10, 4)
    every = (whole[8:], 8)
    ranks: list[dict[str, Held]] = [
        {"w": (whole, (whole[at : at + 4], at), every)} for at in (0, 4)
    ]
    told = judged([reply(held) for held in ranks])
    assert (told["result"], told["num_tensors"], told["unknown"]) == ("equal", 1, [])
    ranks[1]["w"] = (whole, (whole[4:8], 4), (whole[8:] + 1, 8))
    assert judged([reply(held) for held in ranks])["different"] == ["w"]
    # The second rank lacks its shard: the part on all ranks does not stand in for it.
    ranks[1]["w"] = (whole, every)
    assert judged([reply(held) for held in ranks])["unknown"] == ["w"]


def test_a_scrub_combines_tensors_that_only_one_stage_has():
    one, other, both = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8)
    first = reply({"a": (one, (one, 0)), "e": (both, (both, 0))})
    last = reply({"b": (other, (other, 0)), "e": (both, (both, 0))})
    told = judged([first, last])
    assert (told["result"], told["num_tensors"]) == ("equal", 3)
    last = reply({"b": (other, (other + 1, 0)), "e": (both, (both * 2, 0))})
    assert judged([first, last])["different"] == ["b", "e"]


def test_a_scrub_without_an_expected_digest_reports_unknown():
    nothing = reply({}) | {"unknown": ["w"]}
    told = judged([nothing])
    assert (told["result"], told["num_unknown"]) == ("unknown", 1)
