"""What delta staging does not support yet; decided when the engine starts.

With one set of weights, every element of a checkpoint has to have its place in a live
parameter, and nothing may be computed from it. Quantised layers are an exception: each
update processes them in memory of their own. All that their kernels read has to be in
parameters, as the swap reaches nothing else.
"""

from __future__ import annotations

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model.kinds import classifier, mla, moe, quantized
from vllm.inflight.worker.model.layers import layers


def one_set_obstacle(
    live: torch.nn.Module, vllm_config: upstream.VllmConfig
) -> str | None:
    """Why an engine cannot be updated with one set of weights; None if it can."""
    if classifier.method_of(live, vllm_config.model_config) is not None:
        return "the score of the classifier is computed from its head"
    for name, layer in layers(live):
        for kernel, _, kept in quantized.kept(layer, layer):
            return (
                f"layer {name} is quantised, and its kernel multiplies with a copy of "
                f"its weights ({type(kernel).__name__}.{kept}), which "
                "--inflight-staging device or host updates"
            )
        if moe.is_packed(layer):
            return f"the experts of layer {name} are packed for the CPU build"
        if mla.is_latent(layer) and not mla.are_views(layer):
            return (
                f"layer {name} multiplies with halves of its weight that have memory "
                "of their own"
            )
    return None
