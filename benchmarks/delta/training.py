"""A model of bf16 weights that is trained with AdamW and fp32 master weights."""

from __future__ import annotations

import torch

from benchmarks.delta.model import Model, Size, own_text, tokens_of

Tensors = dict[str, torch.Tensor]


class Training:
    """The training of one model on the text of this repository.

    Args:
        size: of the model.
        device: where it is trained.

    """

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        # Computed in fp32, from weights that are rounded to bf16: a core multiplies
        # fp32 faster, and the weights are those that an engine would serve.
        self.model = Model(size).to(device)
        self.master = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.tokens = tokens_of(own_text(), size.vocab).to(device)
        self._random = torch.Generator().manual_seed(0)

    def begin(self, rate: float) -> None:
        """Go on at this learning rate, with new moments."""
        params = [t.requires_grad_() for t in self.master.values()]
        self.optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=0.01)

    def step(self, batch: int, length: int) -> float:
        """One step; returns the loss."""
        self.round()
        most = len(self.tokens) - length
        at = torch.randint(most, (batch,), generator=self._random).tolist()
        loss = self.model(torch.stack([self.tokens[n : n + length] for n in at]))
        loss.backward()
        for name, param in self.model.named_parameters():
            self.master[name].grad, param.grad = param.grad, None
        torch.nn.utils.clip_grad_norm_(self.master.values(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def round(self) -> None:
        """Give the model its weights, rounded to bf16."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self.master[name].bfloat16())

    def weights(self) -> Tensors:
        """The weights as they would be served."""
        return {n: t.detach().bfloat16() for n, t in self.master.items()}
