"""Delta staging of tensors that are read where their trainer has them.

A trainer on the engine's own GPU lends them. Here the tensors of a folder are lent, and
the host's digests stand in for a GPU's.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_delta_staging import (  # noqa: F401 (fixtures)
    delta_engine,
    llm,
    on_old,
    shadow_of,
    tokens,
    without_packing,
)
from tests.support.deltas import stepped
from tests.support.engines.probe import greedy
from vllm.inflight import ops
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.transport.files import receiver_engine
from vllm.inflight.worker.staging import loader
from vllm.inflight.worker.staging.loader import UpdateLoader

pytestmark = pytest.mark.engine

NORM = "model.norm.weight"


class Lending:
    """Tensors that are lent, if the loader wants it; four at once."""

    def __init__(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._pairs = pairs
        self.close = pairs.close
        self.was_lent = False
        self.handed: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._pairs

    def lend(self) -> None:
        self.was_lent = True

    def batches(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        while batch := [*islice(self._pairs, 4)]:
            self.handed |= dict(batch)
            yield batch


class HostDigest:
    """The digests of a GPU, computed on the host."""

    def __init__(self, *_: Any) -> None:
        self._found: list[tuple[str, ops.Digest, int]] = []

    def add(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self._found.append((name, *ops.digest([tensor]), 0))

    def results(self) -> list[tuple[str, ops.Digest, int]]:
        return self._found


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[Lending]:
    """What the transport of the engine hands to the loader, call by call."""
    made: list[Lending] = []
    read = receiver_engine.read_opened

    def read_and_lend(*args: Any) -> Lending:
        made.append(Lending(read(*args)))
        return made[-1]

    monkeypatch.setattr(receiver_engine, "read_opened", read_and_lend)
    monkeypatch.setattr(loader, "GpuDigest", HostDigest)
    return made


@pytest.mark.parametrize("has_digests", [True, False])
def test_versions_equal_a_fresh_engine_and_are_read_in_place_if_digests_prove_them(
    on_old,  # noqa: F811 (the fixture)
    fresh,
    new,
    lent,
    monkeypatch,
    has_digests,
):
    """Without digests, nobody would see that a trainer has written meanwhile."""
    begin = UpdateLoader.__init__

    def started(self: UpdateLoader, *args: Any, **options: Any) -> None:
        begin(self, *args, **options | {"verify": has_digests})

    monkeypatch.setattr(UpdateLoader, "__init__", started)
    before = tokens(on_old)
    on_old.update_weights_from_disk(str(new), "new")
    assert [each.was_lent for each in lent] == [has_digests]
    assert greedy(on_old) == fresh
    on_old.rollback_weights()
    assert tokens(on_old) == before


def test_a_trainer_that_writes_into_a_tensor_while_it_is_read_is_refused(
    on_old,  # noqa: F811 (the fixture)
    old,
    tmp_path,
    lent,
    monkeypatch,
):
    """Neither what came first nor what came later is served."""
    new = stepped(load_file(old / "model.safetensors"), 5, share=0.05)
    save_file(new, tmp_path / "model.safetensors")
    before = tokens(on_old)
    take = UpdateLoader._take_known

    def write_after(self: UpdateLoader, known: Any) -> None:
        take(self, known)
        for name, _, tensor in known:
            if name == NORM:
                tensor.view(torch.int16)[0] ^= 1

    monkeypatch.setattr(UpdateLoader, "_take_known", write_after)
    with pytest.raises(WeightsMismatch, match="changed it while it was read") as caught:
        on_old.update_weights_from_disk(str(tmp_path), "torn")
    assert caught.value.tensors == [NORM]
    assert tokens(on_old) == before
    monkeypatch.undo()
    on_old.update_weights_from_disk(str(tmp_path), "whole")


def test_a_loader_gets_a_copy_of_what_it_may_keep(
    on_old,  # noqa: F811 (the fixture)
    old,
    tmp_path,
    lent,
    monkeypatch,
):
    """As of a quantised layer, whose tensors upstream keeps until the last one came."""
    new = load_file(old / "model.safetensors")
    new[NORM] = new[NORM].float()  # of which the engine knows no copies
    save_file(new, tmp_path / "model.safetensors")
    handed: dict[str, int] = {}
    take = UpdateLoader._take_new

    def look(self: UpdateLoader, name: str, tensor: torch.Tensor, entry: Any) -> None:
        handed[name] = tensor.data_ptr()
        take(self, name, tensor, entry)

    monkeypatch.setattr(UpdateLoader, "_take_new", look)
    on_old.update_weights_from_disk(str(tmp_path), "in float32")
    (each,) = lent
    assert handed.keys() == {NORM}
    assert handed[NORM] != each.handed[NORM].data_ptr()
