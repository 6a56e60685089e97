"""Derived parameters are computed again for every version, and flipped with it."""

from collections.abc import Callable

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.utils import replace_parameter

from vllm.inflight.releases.table import holds
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model.kinds import mla
from vllm.inflight.worker.model.support import difference
from vllm.inflight.worker.shadow.flip import Exchange
from vllm.inflight.worker.shadow.parameters import mirror_parameters

RANK, WIDTH = 4, 6
COPIED: dict[str, bool] = {"prefer_copy": True} if holds(None, "0.33.0") else {}
"""From 0.33 on, upstream copies where it can without being asked."""


class Latent(MLAAttention):
    """Latent attention's weight and its halves, and nothing that computes."""

    def __init__(self, empty: Callable[..., torch.Tensor]) -> None:
        torch.nn.Module.__init__(self)
        self.kv_b_proj = torch.nn.Module()
        weight = torch.nn.Parameter(empty((WIDTH, RANK)), requires_grad=False)
        self.kv_b_proj.weight = weight

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        keys, values = self.kv_b_proj.weight.to(act_dtype).split(WIDTH // 2)
        replace_parameter(self, "W_UV", values.t(), **COPIED)
        replace_parameter(self, "W_UK_T", keys, **COPIED)

    def shows(self, weight: torch.Tensor) -> bool:
        keys, values = weight.split(WIDTH // 2)
        return (
            torch.equal(self.kv_b_proj.weight, weight)
            and torch.equal(self.W_UV, values.t())
            and torch.equal(self.W_UK_T, keys)
        )


def version(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, RANK, generator=torch.Generator().manual_seed(seed))


def loaded(empty: Callable[..., torch.Tensor]) -> Latent:
    live = Latent(empty)
    live.kv_b_proj.weight.copy_(version(0))
    live.process_weights_after_loading(torch.float32)
    return live


@pytest.mark.parametrize("memory", ["arena", "exchanged"])
def test_derived_halves_belong_to_the_served_version(memory):
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        live = loaded(arena.empty if memory == "arena" else torch.empty)
        with torch.device("meta" if memory == "arena" else "cpu"):
            second = Latent(torch.empty)
        mla.make_places(live, second)
        assert difference(live, second) is None
        if memory == "arena":
            arena.consolidate()
            arena.pair()
            mirror_parameters(live, second, arena.shadow_tensor)
            flip = arena.flip
        else:
            flip = Exchange(live, second)
        for seed in 1, 2:
            second.kv_b_proj.weight.data.copy_(version(seed))
            mla.derive(second, torch.float32)
            assert live.shows(version(seed - 1))
            flip()
            assert live.shows(version(seed))
            flip()
            assert live.shows(version(seed - 1))
            flip()
            if memory == "arena":
                arena.settle()


def test_derived_parameters_are_no_part_of_a_checkpoint():
    live = loaded(torch.empty)
    names = {key for key in live._parameters if mla.is_derived(live, key)}
    assert names == {"W_UV", "W_UK_T"}
    assert not mla.is_derived(torch.nn.Linear(1, 1), "W_UV")


def test_halves_are_views_where_upstream_has_split_the_weight_and_not_copied_it():
    live = Latent(torch.empty)
    live.kv_b_proj.weight.copy_(version(0))
    assert not mla.are_views(live)  # there are none yet
    live.process_weights_after_loading(torch.float32)
    assert mla.are_views(live)
    live.kv_b_proj.weight.copy_(version(1))
    assert live.shows(version(1))
    live.W_UV.data = live.W_UV.data.clone()
    assert not mla.are_views(live)
    live.process_weights_after_loading(torch.float64)
    assert not mla.are_views(live)
