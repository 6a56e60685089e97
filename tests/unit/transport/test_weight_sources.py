"""Weight sources as the releases have them: a method and an iterator, or owners."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import ParamMeta

from vllm.inflight.releases.table import adapter
from vllm.inflight.transport.owned_source import OwnedSource

TENSORS = {name: torch.full((2,), n) for n, name in enumerate("abcde")}


class Fact:
    """What a source says of a tensor."""

    def __init__(self, name: str) -> None:
        self.name = name


class Source:
    """What vLLM 0.33 asks of a source; `not_owned` belongs to other ranks."""

    def __init__(self, *not_owned: str, is_whole: bool = True) -> None:
        self.named = dict(TENSORS)
        self.not_owned = not_owned
        self.is_whole = is_whole

    @cached_property
    def metadata(self) -> list[Fact]:
        return [Fact(name) for name in self.named]

    def implements_iter_full(self) -> bool:
        return self.is_whole

    def owned_names(self, rank: int) -> list[str]:
        assert rank == 0, "the rank that sends"
        return [f.name for f in self.metadata if f.name not in self.not_owned]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.named.items())


def names(facts: Any) -> list[str]:
    return [fact.name for fact in facts]


def test_a_source_of_ours_has_the_form_of_the_installed_release() -> None:
    class Mine(adapter("weight source")):  # type: ignore[misc]
        def read_facts(self) -> list[ParamMeta]:
            return [ParamMeta(n, t.dtype, t.shape) for n, t in TENSORS.items()]

        def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(TENSORS.items())

    source = Mine()  # an abstract method of upstream's would be missing here
    reader = adapter("weight source")
    assert names(reader.facts_of(source)) == list(TENSORS)
    assert dict(reader.tensors_of(source)) == TENSORS


def test_each_update_asks_again_which_tensors_there_are() -> None:
    source = Source()
    assert names(OwnedSource.facts_of(source)) == list("abcde")
    del source.named["c"]
    assert names(OwnedSource.facts_of(source)) == list("abde")
    assert [name for name, _ in OwnedSource.tensors_of(source)] == list("abde")


def test_tensors_that_the_sender_does_not_own_are_named() -> None:
    with pytest.raises(ValueError, match=r"does not own 'b', 'c', 'd' and 1 more"):
        OwnedSource.tensors_of(Source("b", "c", "d", "e"))
    with pytest.raises(ValueError, match=r"does not own 'b'$"):
        OwnedSource.tensors_of(Source("b"))


def test_a_source_with_parts_alone_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"Source has only iter_local.*needs iter_full"
    ):
        OwnedSource.tensors_of(Source(is_whole=False))
