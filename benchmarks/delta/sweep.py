"""Speed and size of the codec, over the share of elements that differ.

A share of bf16 elements changes by one or two units in the last place. Timed are the
search with its coding, the decoding and the application, on one core or on a GPU.
"read" is the time of comparing two equal copies with torch, which reads both once. Each
time is the best of some runs; on the CPU it is the thread's own, so that other load on
the machine counts little.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vllm.inflight.delta import Encoder, Part, apply, decode
from vllm.inflight.delta.decoded import DecodedPart

SHARES = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.25, 1.0)


def sweep(device: torch.device, num_tensors: int, numel: int, repeat: int) -> list[Any]:
    """The figures of every share."""
    torch.manual_seed(0)
    shape = num_tensors, numel
    old = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    same = old.clone()
    whole = old.nbytes

    clock = time.thread_time if device.type == "cpu" else time.perf_counter

    def best(work: Callable[[], Any]) -> tuple[float, Any]:
        seconds, found = math.inf, None
        for _ in range(repeat):
            found = None  # its memory is used again
            _wait(device)
            began = clock()
            found = work()
            _wait(device)
            seconds = min(seconds, clock() - began)
        return seconds, found

    copies = old.view(torch.int64), same.view(torch.int64)
    rows = []
    for share in SHARES:
        new = stepped(old, share)
        pairs = list(zip(old, new, strict=True))
        read_s, _ = best(partial(torch.equal, *copies))
        encode_s, (parts, numbers) = best(partial(encoded, pairs))
        sizes = [numel] * len(numbers)
        for part in parts:
            part.check(sizes, [2] * len(sizes))
        decode_s, decoded = best(partial(decoded_parts, parts))
        target = old.clone()

        began = time.perf_counter()
        for part in decoded:
            for changes in part:
                apply(changes, target[numbers[changes.number]])
        _wait(device)
        apply_s = time.perf_counter() - began  # once: it adds differences
        assert torch.equal(target.view(torch.int16), new.view(torch.int16))
        num = int((old.view(torch.int16) != new.view(torch.int16)).sum())
        num_bytes = sum(part.num_bytes for part in parts)
        rows.append(
            {
                "share": share,
                "changed": num,
                "bytes": num_bytes,
                "bytes_per_change": num_bytes / num,
                "share_of_whole": num_bytes / whole,
                "encode_s": encode_s,
                "decode_s": decode_s,
                "apply_s": apply_s,
                "read_s": read_s,
                "encode_speed_of_read": read_s / encode_s,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def stepped(old: torch.Tensor, share: float) -> torch.Tensor:
    """A share of all elements moves by one or two units in the last place."""
    new = old.clone()
    bits = new.view(-1).view(torch.int16)
    if share < 1:
        num = max(1, round(share * bits.numel()))
        at = torch.randint(bits.numel(), (num,), device=old.device).unique()
        steps = torch.randint(1, 3, at.shape, device=old.device, dtype=torch.int16)
        steps *= 1 - 2 * (steps.roll(1) & 1)
        bits[at] += steps
    else:
        bits += 1
    return new


def encoded(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The parts between these tensors, and which of them have changed."""
    encoder = Encoder()
    parts = [*encoder.add_all(0, pairs), *encoder.finish()]
    return parts, [n for n, has in enumerate(encoder.have_changed) if has]


def decoded_parts(parts: Sequence[Part]) -> list[DecodedPart]:
    """All changes of these parts."""
    return [decode(part) for part in parts]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
