"""The destination table of delta staging: where each checkpoint tensor is served.

With shadow parameters, the plan is recorded when the first update is loaded. With delta
staging no update is loaded. So the model's own loaders are called when the engine
starts, with tensors of the start checkpoint's names, shapes and dtypes, and without
content. The parameters have no memory. What a loader would write is recorded, and
proved with index patterns (replay_check.py).

Quantised layers are left out: upstream processes them at every whole update, and what
it has made of them is compared as a whole. Where a delta may change them, kept_table.py
finds out.
"""

from __future__ import annotations

from math import prod

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.replay_plan import Entry
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.coverage import Coverage, Fill

MOST_NAMED = 4
"""Most parameters that a message names."""

logger = upstream.init_logger(__name__)


def fill_table(shadow: ShadowModel) -> str | None:
    """Record and prove where the tensors of the start checkpoint are served.

    Returns:
        why the model cannot be updated with one set of weights; None if it can. An
        engine whose start checkpoint is not known learns at its first update.

    """
    assert shadow.module is not None
    with torch.no_grad():
        _trace(shadow)
    if not len(shadow.start_checkpoint):
        return None
    shadow.learn()
    if short := _not_filled(shadow):
        more = f" and {len(short) - MOST_NAMED} more" if len(short) > MOST_NAMED else ""
        return (
            "its loader does not only copy what fills "
            f"{', '.join(short[:MOST_NAMED])}{more}"
        )
    logger.info(
        "delta staging: the places of %d tensors are proved", shadow.plan.num_proved
    )
    return None


def _trace(shadow: ShadowModel) -> None:
    """Call the loaders with tensors of the start checkpoint, without content."""
    assert shadow.module is not None
    coverage = Coverage(shadow.module, shadow.required, set(), (), shadow.device)
    coverage.watch(lambda weights: None)
    try:
        for name, (shape, dtype) in shadow.start_checkpoint.known.items():
            if shape is None or dtype is None:
                continue
            if name in shadow.ignored or _is_processed(shadow, name):
                continue
            # Memory that nobody writes to takes nothing.
            tensor = torch.empty(
                tuple(shape), dtype=getattr(torch, dtype), device="cpu"
            )
            entry = Entry(tensor.shape, tensor.dtype)
            coverage.handed, coverage.entry = tensor, entry
            try:
                with coverage.watching():
                    shadow.load([(name, tensor)])
            except Exception:  # every loader raises its own kind of error
                logger.debug("the loader did not take %r alone", name, exc_info=True)
                continue
            if not entry.num_unread or not shadow.is_alone:
                shadow.plan.keep(name, entry)
    finally:
        coverage.handed = coverage.entry = None
        coverage.unwatch()


def _is_processed(shadow: ShadowModel, name: str) -> bool:
    """Whether a tensor is of a quantised layer, which has no places for it."""
    if not shadow.quantised:
        return False
    return not shadow.quantised.isdisjoint(shadow.places.params_of(name))


def _not_filled(shadow: ShadowModel) -> list[str]:
    """Parameters with elements that no proved entry fills."""
    fills = {
        name: Fill(shape.numel())
        for name, shape in shadow.required.items()
        if name not in shadow.quantised
    }
    for _, entry in shadow.plan.items():
        for param, view in entry.filled if entry.is_proved else ():
            fills[param].views[view] = prod(view[1])
    return [name for name, fill in fills.items() if fill.missing]
