"""A census: every tensor and every number that can be reached from a served model.

Tokens show that what is read at a step is of one version. A census also finds what is
not read today: two models of the same weights have the same, however they got them.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm.inflight.worker.model.layers import Walked

PASSED_OVER = {
    *("_modules", "kv_cache", "training", "unique_name", "name_or_path"),
    Walked,
}
"""Layers, and parameters that are known by name, come by themselves; KV is no weight;
some names are of an engine."""
COUNTS = {"_hits", "_total"}
"""How often a cache was asked, which is of an engine, too."""
DEEPEST = 5
PLAIN = bool, int, float, str, type(None)

Found = tuple[str, Any]
"""A path from the model, and what is there: a plain value, or a tensor's digest."""


def census(llm: Any) -> dict[str, Any]:
    """Of the one worker of an engine in this process."""
    (found,) = llm.collective_rpc(lambda w: dict(_of_model(w.model_runner.model)))
    return dict(found)


def _of_model(model: torch.nn.Module) -> Iterator[Found]:
    seen: set[int] = set()
    for name, layer in model.named_modules():
        for key, value in vars(layer).items():
            if key not in PASSED_OVER and not key.endswith("hooks"):
                yield from _of(f"{name}.{key}", value, seen, 0)


def _of(path: str, value: Any, seen: set[int], depth: int) -> Iterator[Found]:
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().flatten().view(torch.uint8)
        yield path, hashlib.blake2b(content.numpy().tobytes()).hexdigest()
    elif isinstance(value, PLAIN):
        yield path, value
    elif id(value) not in seen and depth < DEEPEST:
        seen.add(id(value))
        for key, inner in _inner(value):
            if key in PASSED_OVER | COUNTS:
                continue
            yield from _of(f"{path}.{key}", inner, seen, depth + 1)


def _inner(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif not isinstance(value, torch.nn.Module):
        # What computes a layer, but not what it was configured with.
        is_upstreams = type(value).__module__.startswith("vllm.")
        if is_upstreams and "Config" not in type(value).__name__:
            yield from vars(value).items() if hasattr(value, "__dict__") else ()
