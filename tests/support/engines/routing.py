"""Which experts a plain transformers forward chooses for each token of a sequence."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Routing:
    """The routers of several versions of one mixture of experts.

    Args:
        versions: label → checkpoint.

    """

    def __init__(self, versions: Mapping[str, Path]) -> None:
        self._models = {
            label: AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32
            ).eval()
            for label, path in versions.items()
        }
        config = next(iter(self._models.values())).config
        self._config, self.top = config, int(config.num_experts_per_tok)
        self.layers = int(config.num_hidden_layers)

    @torch.inference_mode()
    def rows(self, ids: Sequence[int], labels: Sequence[str]) -> torch.Tensor:
        """The experts of each position, sorted: [positions, layers, top].

        `labels[p]` is the version that reads the token at position p. It attends to
        the KV that the versions before it have computed.
        """
        cache, at, found = DynamicCache(config=self._config), 0, []
        while at < len(ids):
            end = at
            while end < len(ids) and labels[end] == labels[at]:
                end += 1
            out = self._models[labels[at]](
                torch.tensor([list(ids[at:end])]),
                past_key_values=cache,
                use_cache=True,
                output_router_logits=True,
            )
            chosen = [
                logits.reshape(end - at, -1).topk(self.top).indices
                for logits in out.router_logits
            ]
            found.append(torch.stack(chosen, 1))
            at = end
        return torch.cat(found).sort(-1).values
