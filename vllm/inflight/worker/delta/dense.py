"""Dense in, log out: whole tensors of an update, with delta staging.

A whole tensor is compared with the live parameters, along the copies that its loader
would make. Only the elements that differ enter the log. Nothing has to be known of the
version that is served, and nothing else of the tensor is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from vllm.inflight import ops
from vllm.inflight.ops.reference import row_major
from vllm.inflight.worker.replay_plan import Entry, View
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import elements

PIECE = 1 << 24
"""Elements that are compared at once; each that differs takes up to 40 bytes of scratch
memory."""


def log_differences(
    log: ChangeLog,
    live: Mapping[str, torch.Tensor],
    entry: Entry,
    tensor: torch.Tensor,
) -> None:
    """Log the elements in which a tensor differs from what is served.

    Args:
        log: of the rank.
        live: the live parameters, by name.
        entry: what the loader would do with the tensor.
        tensor: contiguous.

    """
    first = int(tensor.storage_offset())
    for copied in entry.copies:
        offset, shape, stride = copied.part
        source = tensor.as_strided(shape, stride, first + offset)
        _compare(log, live, copied.param, copied.view, source)
    for zeroed in entry.zeros:
        param = live[zeroed.param]
        zero = torch.zeros((), dtype=param.dtype, device=param.device)
        _compare(log, live, zeroed.param, zeroed.view, zero.expand(zeroed.view[1]))


def _compare(
    log: ChangeLog,
    live: Mapping[str, torch.Tensor],
    param: str,
    view: View,
    source: torch.Tensor,
) -> None:
    """Compare a view of a parameter with what the update brings for it."""
    offset, shape, stride = view
    if prod(shape) > PIECE:
        dim = max(range(len(shape)), key=shape.__getitem__)
        half = shape[dim] // 2
        for at, size in ((0, half), (half, shape[dim] - half)):
            cut = (*shape[:dim], size, *shape[dim + 1 :])
            part = offset + at * stride[dim], cut, stride
            _compare(log, live, param, part, source.narrow(dim, at, size))
        return
    held = live[param].data
    integer = ops.INTEGERS[held.element_size()]
    served = held.as_strided(shape, stride, held.storage_offset() + offset)
    new = source.to(served.device, served.dtype).contiguous().view(integer)
    (places,) = (new != served.view(integer)).reshape(-1).nonzero(as_tuple=True)
    if not len(places):
        return
    if not log.has_room:  # the rest is counted all the same
        log.reserve(param, len(places), held.element_size())
        return
    offsets = _offsets(places, view)
    log.add(param, offsets, elements(held, integer)[offsets], new.view(-1)[places])


def _offsets(places: torch.Tensor, view: View) -> torch.Tensor:
    """The offsets of elements of a view, given their row-major numbers in it."""
    offset, shape, stride = view
    if tuple(stride) == tuple(row_major(shape)):
        return places + offset
    offsets = torch.full_like(places, offset)
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        offsets += places % size * step
        places = places.div(size, rounding_mode="floor")
    return offsets
