"""Sources: whatever holds weights is one stream of named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm.inflight.errors import ConfigError, Malformed
from vllm.inflight.trainer.sources.cast import check_cast, served_dtype
from vllm.inflight.trainer.sources.stream import check_source, facts, shards, tensors
from vllm.inflight.transport.weight_source import Weights


class Model(nn.Module):
    """An embedding, a head that may be tied to it, and two buffers."""

    def __init__(self, *, tied: bool = False, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.lm_head = nn.Linear(4, 8, bias=False)
        self.embed = nn.Embedding(8, 4)
        if not head_first:
            self.lm_head = nn.Linear(4, 8, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def names(source: Any) -> list[str]:
    check_source(source)
    return sorted(name for name, _ in tensors(source))


PAIRS = [("a", torch.ones(2)), ("b", torch.zeros(3))]


def stream() -> Iterator[tuple[str, torch.Tensor]]:
    yield from PAIRS


@pytest.mark.parametrize(
    "source",
    [dict(PAIRS), PAIRS, tuple(PAIRS), stream, lambda: dict(PAIRS), lambda: PAIRS],
    ids=["dict", "list", "tuple", "generator", "callable-dict", "callable-list"],
)
def test_every_kind_of_source_is_the_same_stream_again_and_again(source):
    check_source(source)
    for _ in range(2):
        found = list(tensors(source))
        assert [name for name, _ in found] == ["a", "b"]
        assert all(
            torch.equal(x, y) for (_, x), (_, y) in zip(found, PAIRS, strict=True)
        )


def test_a_module_gives_its_parameters_and_its_persistent_buffers():
    assert names(Model()) == ["embed.weight", "lm_head.weight", "mean"]


def test_yielded_tensors_are_detached_and_share_the_memory_of_the_module():
    model = Model()
    found = dict(tensors(model))
    assert not found["embed.weight"].requires_grad
    assert found["embed.weight"].data_ptr() == model.embed.weight.data_ptr()


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("of", [lambda m: m, lambda m: m.state_dict()])
def test_a_tied_head_is_left_out_whichever_comes_first(
    of: Callable[[nn.Module], Any], head_first: bool
):
    source = of(Model(tied=True, head_first=head_first))
    assert names(source) == ["embed.weight", "mean"]


def test_tied_layers_of_a_module_are_sent_once():
    block = nn.Linear(2, 2, bias=False)
    assert names(nn.Sequential(block, nn.ReLU(), block)) == ["0.weight"]


def test_entries_of_a_state_dict_that_share_memory_are_both_sent():
    zeros = torch.zeros(4)
    assert names({"a.bias": zeros, "b.bias": zeros}) == ["a.bias", "b.bias"]


def test_views_of_one_memory_are_not_the_same_tensor():
    whole = torch.arange(8.0)
    source = {"lm_head.weight": whole[:4], "embed.weight": whole[4:], "all": whole}
    assert names(source) == ["all", "embed.weight", "lm_head.weight"]


def test_names_lose_the_parts_that_torch_wrappers_add():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    compiled = torch.compile(model)  # compiles nothing until it is called
    assert names(compiled) == names(compiled.state_dict()) == ["0.weight"]
    assert names({"a._checkpoint_wrapped_module.w": torch.ones(1)}) == ["a.w"]


def test_a_sharded_tensor_is_gathered():
    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            return torch.ones(4)

    shard = torch.zeros(1).as_subclass(Sharded)
    ((_, whole),) = tensors({"w": shard})
    assert torch.equal(whole, torch.ones(4))


def test_extra_state_is_left_out_and_other_non_tensors_are_rejected():
    assert names({"a": torch.ones(1), "block._extra_state": b"x"}) == ["a"]
    with pytest.raises(Malformed, match="'b' has the type list"):
        names({"b": [1.0]})


def test_a_source_that_can_be_read_only_once_is_rejected():
    with pytest.raises(ConfigError, match="give the callable"):
        check_source(stream())
    with pytest.raises(ConfigError, match="got int"):
        check_source(3)


@pytest.mark.parametrize("path", ["/models/qwen", Path("/models/qwen")])
def test_a_path_is_no_source_and_the_message_says_what_to_call(path):
    with pytest.raises(ConfigError, match=r"'/models/qwen'.*update_weights_from_disk"):
        check_source(path)


@pytest.mark.parametrize("entries", [[torch.ones(2)], ["ab"], [("a", 1, 2)]])
def test_a_source_without_pairs_is_rejected(entries):
    with pytest.raises(Malformed, match="not pairs of name and tensor"):
        names(entries)


MIXED = {
    "norm": torch.full((3,), 1.01),
    "half": torch.full((2,), 1.01, dtype=torch.float16),
    "fp8": torch.ones(2, dtype=torch.float8_e4m3fn),
    "ids": torch.arange(3),
}


def norm_alone(name: str) -> torch.dtype | None:
    return torch.bfloat16 if name == "norm" else None


@pytest.mark.parametrize(
    ("cast", "names"),
    [(torch.bfloat16, {"norm", "half"}), (norm_alone, {"norm"}), (None, set())],
)
def test_numbers_are_cast_and_nothing_else(cast: Any, names: set[str]) -> None:
    expected = {n: t.bfloat16() if n in names else t for n, t in MIXED.items()}
    of_weights = Weights(MIXED, dtype=cast)
    told = [
        dict(tensors(MIXED, cast)),
        {shard.name: shard.tensor for shard in shards(MIXED, cast)},
        dict(of_weights.read_tensors()),
        {shard.name: shard.tensor for shard in of_weights.read_shards()},
    ]
    for found in told:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].float(), tensor.float())
    for name, known in facts(MIXED, cast):
        assert known == (expected[name].dtype, tuple(expected[name].shape))
    assert [m.dtype for m in of_weights.read_facts()] == [
        tensor.dtype for tensor in expected.values()
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (["bfloat16", "bfloat16"], torch.bfloat16),
        (["float32"], torch.float32),
        (["bfloat16", "float16"], None),  # of two engines
        (["bfloat16", None], None),  # the second one serves several
        (["float8_e4m3fn"], None),
        (["nn"], None),
        ([], None),
    ],
)
def test_weights_are_cast_to_what_all_engines_serve_and_to_nothing_else(
    told: list[str | None], expected: torch.dtype | None
) -> None:
    assert served_dtype({"staging": {"dtype": one}} for one in told) == expected


def test_servers_of_older_releases_tell_no_dtype() -> None:
    assert served_dtype([{}, {"staging": None}, {"staging": {"bytes": 1}}]) is None


@pytest.mark.parametrize("cast", [torch.int8, torch.float8_e5m2, "bfloat16", 16])
def test_what_no_number_can_be_cast_to_is_refused(cast: Any) -> None:
    for refuse in (check_cast, lambda dtype: Weights(MIXED, dtype=dtype)):
        with pytest.raises(ConfigError, match="dtype must be a floating-point dtype"):
            refuse(cast)
    read: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in MIXED.items():
            read.append(name)
            yield name, tensor

    with pytest.raises(ConfigError, match="dtype"):
        list(tensors(source, lambda name: cast))
    assert read == list(MIXED), "other ranks would wait for the rest"
