"""Upstream's calls that write into what a rank serves, past any update.

One that fails before its first write has changed nothing. So the functions of upstream
that write note it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch

from vllm.inflight.commit.adapter import kept
from vllm.inflight.stage import reload
from vllm.inflight.stage.steps import between_steps

_model: ContextVar[torch.nn.Module | None] = ContextVar("what is written into")
_written: WeakSet[torch.nn.Module] = WeakSet()
"""Models that a call has written into, and nobody has been told."""

SOURCE = "model", "model_weights", "revision"
"""Fields of a model's config that a reload sets before it looks for the files."""


def note() -> None:
    """What comes next is written into what a worker serves, if a call is under way."""
    if (model := _model.get(None)) is not None:
        _written.add(model)


@contextmanager
def overwriting(worker: Any) -> Iterator[None]:
    """Around a call that writes: adapters stay loaded, and steps come before or after.

    Upstream lets adapters go when the weights below them are others.
    """
    config = worker.vllm_config.model_config
    source = {field: getattr(config, field) for field in SOURCE}
    model = worker.model_runner.get_model()
    token = _model.set(model)
    try:
        with between_steps(worker), kept(worker.model_runner):
            yield
    except BaseException:
        if model not in _written:
            for field, value in source.items():
                setattr(config, field, value)
        raise
    finally:
        _model.reset(token)


def overwritten(worker: Any) -> None:
    """On a worker: nobody knows what it serves, nor where its second set differs."""
    _written.discard(worker.model_runner.get_model())
    if (stager := getattr(worker, "_inflight_stager", None)) is not None:
        stager.forget(served=True)
        stager.shadow.behind.update(stager.shadow.required)


def put_back(worker: Any) -> bool:
    """Take what a worker serves out of a load that has not ended.

    Else its parameters would have no memory, and nothing could be put into it. Returns
    whether it is what it was.
    """
    model = worker.model_runner.get_model()
    reload.leave(model)
    return model not in _written
