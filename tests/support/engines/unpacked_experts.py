"""Experts of CPU engines that are not packed, as those of a GPU never are.

Upstream's CPU kernels pack all experts, and take no share of them. This one reads them
as a loader writes them, and takes those that the rank has.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as of_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)

upstreams = of_moe.select_unquantized_moe_backend
"""What chooses a kernel otherwise."""


class PlainExperts(CPUUnquantizedExperts):
    """One multiplication for each expert, in torch."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave them as they are."""

    def supports_expert_map(self) -> bool:
        """A rank may have some of the experts."""
        return True

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        **others: Any,
    ) -> None:
        """Add up what the experts of this rank make of their tokens."""
        expert_map = others["expert_map"]
        ids = topk_ids.long()
        here = ids if expert_map is None else expert_map.long()[ids]
        found = torch.zeros_like(output, dtype=torch.float32)
        for number in range(w1.shape[0]):
            is_its = here == number
            # All tokens, since a compiler cannot know how many an expert has.
            both = hidden_states.float() @ w1[number].float().T
            gate, up = both.chunk(2, dim=-1)
            made = (torch.nn.functional.silu(gate) * up) @ w2[number].float().T
            found += made * (topk_weights * is_its).sum(-1, keepdim=True)
        output.copy_(found)


def select(moe_config: Any) -> Any:
    """Stand in for upstream's choice of a kernel, where this one fits."""
    fits = moe_config.activation is MoEActivation.SILU and not moe_config.has_bias
    if not fits or not moe_config.is_act_and_mul:
        return upstreams(moe_config)
    # To whom it matters, this says that nothing is packed.
    return UnquantizedMoeBackend.TRITON, PlainExperts
