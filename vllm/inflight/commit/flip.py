"""The flip: two module trees exchange what they hold, tensor by tensor.

Objects stay, contents move: every Parameter of the live tree is the same object
before and after, so nothing that refers to it (compiled graphs, tied layers)
has to be told. On the CPU build that is an exchange of storage pointers; doing
it twice is doing nothing, which is what makes rollback as fast as a commit.
"""

from __future__ import annotations

import torch

from vllm.inflight.stage.swappable import PACKED


class Flip:
    """The pairs of one live tree and its shadow, found before they are needed."""

    def __init__(self, live: torch.nn.Module, shadow: torch.nn.Module) -> None:
        self._params: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._packed: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        seen: set[int] = set()
        for (name, a), (_, b) in zip(
            live.named_modules(), shadow.named_modules(), strict=True
        ):
            if PACKED in vars(a):
                self._packed.append((a, b))
            for key, param in a._parameters.items():
                twin = b._parameters.get(key)
                if param is None or id(param) in seen:
                    continue  # tied: one object, two layers
                seen.add(id(param))
                if twin is None or twin.shape != param.shape:
                    raise RuntimeError(
                        f"{name}.{key} of the staged set is "
                        f"{None if twin is None else tuple(twin.shape)}, the live "
                        f"one {tuple(param.shape)}"
                    )
                self._params.append((param, twin))

    def __call__(self) -> None:
        """Exchange the two sets."""
        for a, b in self._params:
            a.data, b.data = b.data, a.data
        for x, y in self._packed:
            left, right = vars(x), vars(y)
            left[PACKED], right[PACKED] = right[PACKED], left[PACKED]
