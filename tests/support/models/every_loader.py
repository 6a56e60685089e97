"""A model with one of every kind of loader, and what a fresh model makes of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
Loader = Callable[[Any, torch.Tensor], None]

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "whole": ((6, 4), torch.float32),
    "turned": ((5, 5), torch.float32),
    "permuted": ((4, 4, 4), torch.float32),
    "rows": ((6, 4), torch.float32),
    "columns": ((6, 4), torch.float32),
    "interleaved": ((6, 4), torch.float32),
    "padded": ((6, 4), torch.float32),
    "cleared": ((6, 4), torch.float32),
    "cut_off": ((6, 4), torch.float32),
    "upper": ((3, 4), torch.float32),
    "lower": ((3, 4), torch.float32),
    "one": ((6, 4), torch.float32),
    "other": ((6, 4), torch.float32),
    "narrowed": ((6, 4), torch.bfloat16),
    "widened": ((6, 4), torch.float32),
    "computed": ((6, 4), torch.float32),
    "added": ((6, 4), torch.float32),
    "renamed": ((6, 4), torch.float32),
    "last": ((6, 4), torch.float32),
    "overlapping": ((6, 4), torch.float32),
    "experts": ((3, 6, 4), torch.float32),
    "spread": ((6, 4), torch.float32),
    "scalar": ((), torch.float32),
    "in_chunks": ((6, 4), torch.float32),
    "even": ((6, 2), torch.float32),
    "odd": ((6, 2), torch.float32),
    "from_the_end": ((6, 4), torch.float32),
}
"""Of the parameters, which lie in the engine."""


def _rows(at: int, size: int) -> Loader:
    return lambda param, tensor: param.data.narrow(0, at, size).copy_(tensor)


def _padded(param: Any, tensor: torch.Tensor) -> None:
    param.data[: len(tensor)].copy_(tensor)
    param.data[len(tensor) :].fill_(0)


def _cleared(param: Any, tensor: torch.Tensor) -> None:
    param.data.zero_()
    param.data[:].copy_(tensor)


def _cut_off(param: Any, tensor: torch.Tensor) -> None:
    param.data.copy_(tensor)
    param.data[-1].zero_()


def _added(param: Any, tensor: torch.Tensor) -> None:
    param.data.copy_(tensor)
    param.data.add_(1)


def _in_chunks(param: Any, tensor: torch.Tensor) -> None:
    for place, part in zip(param.data.chunk(3), tensor.chunk(3), strict=True):
        place.copy_(part)


def _whole(param: Any, tensor: torch.Tensor) -> None:
    param.data.copy_(tensor)


def _with(change: Callable[[torch.Tensor], torch.Tensor]) -> Loader:
    return lambda param, tensor: param.data.copy_(change(tensor))


def _into(view: Callable[[torch.Tensor], torch.Tensor]) -> Loader:
    return lambda param, tensor: view(param.data).copy_(tensor)


LOADERS: dict[str, dict[str, Loader]] = {
    "whole": {"whole": _whole},
    "turned": {"turned": _with(lambda t: t.t())},
    "permuted": {"permuted": _with(lambda t: t.permute(2, 0, 1))},
    "rows.a": {"rows": _rows(0, 2)},
    "rows.b": {"rows": _rows(2, 4)},
    "columns.a": {"columns": _into(lambda p: p[:, :1])},
    "columns.b": {"columns": _into(lambda p: p[:, 1:])},
    "interleaved.a": {"interleaved": _into(lambda p: p[::2])},
    "interleaved.b": {"interleaved": _into(lambda p: p[1::2])},
    "padded": {"padded": _padded},
    "cleared": {"cleared": _cleared},
    "cut_off": {"cut_off": _cut_off},
    "halves": {
        "upper": _with(lambda t: t[:3]),
        "lower": _with(lambda t: t[3:]),
    },
    "twice": {"one": _whole, "other": _whole},
    "narrowed": {"narrowed": _whole},
    "widened": {"widened": _whole},
    "computed": {"computed": _with(lambda t: -t.exp())},
    "added": {"added": _added},
    "by_its_old_name": {"renamed": _whole},
    "last.a": {"last": _whole},
    "last.b": {"last": _whole},
    "overlapping.a": {"overlapping": _rows(0, 4)},
    "overlapping.b": {"overlapping": _rows(2, 4)},
    "experts.0": {"experts": _into(lambda p: p[0])},
    "experts.1": {"experts": _into(lambda p: p[1])},
    "experts.2": {"experts": _into(lambda p: p[2])},
    "spread": {"spread": _with(lambda t: t.expand(6, 4))},
    "scalar": {"scalar": _whole},
    "in_chunks": {"in_chunks": _in_chunks},
    "alternating": {
        "even": _with(lambda t: t[:, ::2]),
        "odd": _with(lambda t: t[:, 1::2]),
    },
    "from_the_end": {"from_the_end": _with(lambda t: t.flip(0))},
}
"""Checkpoint tensor → the parameters that it fills, and how."""

SENT: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    **{name: SHAPES[name] for name in LOADERS if name in SHAPES},
    "rows.a": ((2, 4), torch.float32),
    "rows.b": ((4, 4), torch.float32),
    "columns.a": ((6, 1), torch.float32),
    "columns.b": ((6, 3), torch.float32),
    "interleaved.a": ((3, 4), torch.float32),
    "interleaved.b": ((3, 4), torch.float32),
    "padded": ((4, 4), torch.float32),
    "halves": ((6, 4), torch.float32),
    "twice": ((6, 4), torch.float32),
    "narrowed": ((6, 4), torch.float32),
    "widened": ((6, 4), torch.bfloat16),
    "by_its_old_name": ((6, 4), torch.float32),
    "last.a": ((6, 4), torch.float32),
    "last.b": ((6, 4), torch.float32),
    "overlapping.a": ((4, 4), torch.float32),
    "overlapping.b": ((4, 4), torch.float32),
    **{f"experts.{n}": ((6, 4), torch.float32) for n in range(3)},
    "spread": ((4,), torch.float32),
    "alternating": ((6, 4), torch.float32),
}
"""Shape and dtype of the tensors of a checkpoint."""

MAPPED = {
    *("whole", "turned", "permuted", "rows.a", "rows.b", "columns.a", "columns.b"),
    *("interleaved.a", "interleaved.b", "padded", "halves", "twice", "narrowed"),
    *("widened", "by_its_old_name", "experts.0", "experts.1", "experts.2", "spread"),
    *("scalar", "in_chunks", "alternating"),
}
"""Those that may be replayed; of the others something else decides what is served."""

IN_PLACE = {
    *("whole", "rows.a", "rows.b", "padded", "by_its_old_name", "scalar"),
    *("experts.0", "experts.1", "experts.2"),
}
"""Those that end up as they come, row by row and in one piece."""

GROUPS: list[tuple[str, ...]] = [
    ("rows.a", "rows.b"),
    ("columns.a", "columns.b"),
    ("interleaved.a", "interleaved.b"),
    ("overlapping.a", "overlapping.b"),
    ("experts.0", "experts.1", "experts.2"),
    ("last.a", "last.b"),
    ("last.a",),
    ("last.b",),
    *((name,) for name in LOADERS if "." not in name),
]
"""Tensors that fill a parameter together."""


class Model(torch.nn.Module):
    """Parameters of `SHAPES`, filled by `LOADERS`."""

    def __init__(self, empty: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        for name, (shape, dtype) in SHAPES.items():
            param = torch.nn.Parameter(empty(shape, dtype=dtype), requires_grad=False)
            # As upstream's: one loader, which is told which part it is handed.
            param.weight_loader = self._load  # type: ignore[attr-defined]
            setattr(self, name, param)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for key in LOADERS[name]:
                param = getattr(self, key)
                param.weight_loader(param, tensor, name, key)

    @staticmethod
    def _load(param: Any, tensor: torch.Tensor, name: str, key: str) -> None:
        LOADERS[name][key](param, tensor)


def version(seed: int) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=random).to(dtype)
        for name, (shape, dtype) in SENT.items()
    }


def fresh(weights: Tensors, before: Model | None = None) -> Model:
    """A model that has loaded these in this order, over another's weights if any."""
    model = Model(torch.zeros)
    with torch.no_grad():
        if before is not None:
            for param, old in zip(model.parameters(), before.parameters(), strict=True):
                param.copy_(old)
        model.load_weights(weights.items())
    return model


def differing(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """The parameters of two models that are not the same, bit for bit."""
    theirs = dict(other.named_parameters())
    return [
        name
        for name, param in one.named_parameters()
        if not torch.equal(_bytes(param), _bytes(theirs[name]))
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
