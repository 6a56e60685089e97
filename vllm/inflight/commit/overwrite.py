"""Upstream's calls that write into what a rank serves, past any update.

One that fails before its first write has changed nothing. So the functions of upstream
that write note that they were reached; a load whose layers all still wait for their
tensors has changed nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from vllm.inflight.commit.adapter import kept
from vllm.inflight.stage import reload
from vllm.inflight.stage.steps import between_steps

_reached: WeakSet[torch.nn.Module] = WeakSet()
"""Models that something may have been written into, since a call began."""


def reached(model: torch.nn.Module) -> None:
    """Note that what comes next may write into a model."""
    _reached.add(model)


@contextmanager
def overwriting(worker: Any) -> Iterator[None]:
    """Around a call that writes: adapters stay loaded, and steps come before or after.

    Upstream lets adapters go when the weights below them are others.
    """
    _reached.discard(worker.model_runner.get_model())
    if getattr(worker, "_inflight_stager", None) is None:
        yield
        return
    with between_steps(worker), kept(worker.model_runner):
        yield


def overwritten(worker: Any) -> None:
    """On a worker: nobody knows what it serves, nor where its second set differs."""
    if (stager := getattr(worker, "_inflight_stager", None)) is not None:
        stager.forget(served=True)
        stager.shadow.behind.update(stager.shadow.required)


def put_back(worker: Any) -> bool:
    """Take what a worker serves out of a load that has not ended.

    Else its parameters would have no memory, and nothing could be put into it. Returns
    whether it is what it was.
    """
    model = worker.model_runner.get_model()
    if model not in _reached:
        return True
    return reload.leave(model) == len(list(model.modules()))
