"""Filling lost weights in place, with delta staging.

With one set of weights there is none to load a version into. While the weights are
lost, nothing decodes with them. So a whole version is written where it will be served,
and is served once it is whole and verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm.inflight.worker.replay_plan import Entry, located, replay


def fill(
    live: Mapping[str, torch.Tensor], known: Sequence[tuple[Entry, torch.Tensor]]
) -> None:
    """Write tensors into the live parameters, as their loaders would.

    Args:
        live: the live parameters, by name.
        known: tensors without gaps, and what the loader does with each.

    """
    with torch.no_grad():
        replay([(located(entry, live), tensor) for entry, tensor in known])


class Filled:
    """The commit of weights that were filled in place: they lie where they are served.

    There is no way back from it.
    """

    def __call__(self) -> float:
        """Do nothing; returns the seconds it took."""
        return 0.0
