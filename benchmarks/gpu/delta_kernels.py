"""The kernels of deltas, one by one, on one GPU and without an engine.

`python -m benchmarks.gpu.delta_kernels [--gib 16] [--shares 0.001 0.01 0.03]`. The
weights are flat tensors of the sizes of an 8B model. Each kernel runs alone, so the
figures are what its work takes when nothing else runs. "GPU alone" is the time of the
kernels and copies themselves. The other figure includes the host, which makes tables
and launches: beside decoding that does not keep the GPU waiting.

The search of the trainer is timed by the clock too, and its commit, in which the kept
version becomes the next one. The kernels of both are timed one by one. So the report
says what the GPU takes of them, and what the host adds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import facts
from vllm.inflight.delta import Encoder
from vllm.inflight.delta.decode import decode_unproved
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.trainer.deltas import batches
from vllm.inflight.trainer.deltas.delta import Delta, DeltaSearch
from vllm.inflight.trainer.deltas.published import PublishedVersion, digests_of
from vllm.inflight.update import TensorSpec
from vllm.inflight.worker.delta.dense import Came, Comparison, KnownTables
from vllm.inflight.worker.delta.destinations import KnownDestinations
from vllm.inflight.worker.delta.device_writer import (
    DeviceWriter,
    copy_elements,
    own_place,
)
from vllm.inflight.worker.delta.targets import Targets
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import ChangedElements
from vllm.inflight.worker.shadow.swap import Swap

SIZES = [4096 * 6144, 4096 * 4096, 2 * 4096 * 12288, 12288 * 4096, 4096, 128]
"""Elements of the parameters of a layer."""

GB = 1e9
REPEATS = 5


def timed(work: Callable[[], object]) -> float:
    """Milliseconds on the GPU, the median of some runs after one."""
    work()
    found = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found)


def of_gpu(work: Callable[[], object]) -> float:
    """Milliseconds of all kernels and copies of some work, without the host."""
    return round(sum(kernels_of(work).values()), 3)


def kernels_of(work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each kernel that runs for some work."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    return {
        each.key[:60]: round(each.self_device_time_total / 1e3, 3)
        for each in recorded.key_averages()
        if each.self_device_time_total
    }


def by_clock(work: Callable[[], object]) -> float:
    """Milliseconds until the GPU has done some work."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def version_of(tensors: dict[str, torch.Tensor]) -> PublishedVersion:
    """These tensors as the version that a trainer keeps."""
    digests = digests_of([*tensors.items()])
    specs = {
        name: TensorSpec(name, tuple(tensor.shape), "bfloat16", digest.hex())
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    }
    return PublishedVersion(tensors, specs)


def timed_search(
    base: PublishedVersion, new: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Milliseconds of a trainer's search by the clock, and of each of its kernels."""

    def search() -> None:
        DeltaSearch(base, "always").find(new.items())

    found: dict[str, Any] = {}
    usual = batches.BATCH_BYTES
    for factor in (4, 1):  # larger batches wait for the GPU less often
        batches.BATCH_BYTES = usual * factor
        search()
        name = f"search, {batches.BATCH_BYTES >> 30} GiB at once"
        found[name] = median(by_clock(search) for _ in range(REPEATS))
    found["kernels of the search"] = kernels_of(search)
    return found


def timed_commit(
    base: PublishedVersion, new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Milliseconds in which a trainer's kept version becomes the next one.

    By the clock, and of each kernel. The version ends as it began.

    Args:
        base: the kept version.
        new: the next one.
        old: a copy of the kept one.

    """

    def found_in(tensors: dict[str, torch.Tensor]) -> Delta:
        delta = DeltaSearch(base, "always").find(tensors.items())
        assert isinstance(delta, Delta)
        return delta

    times = [
        by_clock(found_in(tensors).commit)
        for _ in range(REPEATS)
        for tensors in (new, old)
    ]
    kernels = kernels_of(found_in(new).commit)
    assert all(torch.equal(tensor, new[name]) for name, tensor in base.pairs())
    found_in(old).commit()
    # The first two compile.
    return {
        "commit of the trainer's kept version": median(times[2:]),
        "kernels of that commit": kernels,
    }


def measure(gib: float, share: float) -> dict[str, Any]:
    """Milliseconds of each kernel, with this share of all elements changed."""
    device = torch.device("cuda")
    live: dict[str, torch.Tensor] = {}
    while sum(t.nbytes for t in live.values()) < gib * (1 << 30):
        for size in SIZES:
            bits = torch.randint(0x3C00, 0x3E00, (size,), device=device)
            live[str(len(live))] = bits.to(torch.int16).view(torch.bfloat16)
    shadow = {name: tensor.clone() for name, tensor in live.items()}
    new = {name: tensor.clone() for name, tensor in live.items()}
    for tensor in new.values():
        at = torch.rand(tensor.shape, device=device) < share
        tensor.view(torch.int16)[at] += 1
        del at
    base = version_of(live)
    found = timed_search(base, new) | timed_commit(base, new, shadow)
    encoder = Encoder()
    pairs = [(live[name], tensor) for name, tensor in new.items()]
    parts = [*encoder.add_all(0, pairs), *encoder.finish()]
    # The parts number the tensors that have changed.
    changed = [n for n, has in zip(live, encoder.have_changed, strict=True) if has]
    live, shadow, new = (
        {str(number): tensors[name] for number, name in enumerate(changed)}
        for tensors in (live, shadow, new)
    )
    for part in parts:
        part.check([t.numel() for t in live.values()], [2] * len(live))
    places = [own_place(*each) for each in enumerate(live.values())]
    found["bytes"] = float(sum(part.num_bytes for part in parts))

    def note(name: str, work: Callable[[], object]) -> None:
        found[name], found[f"{name}, GPU alone"] = timed(work), of_gpu(work)

    note("decode", lambda: [decode_unproved(part) for part in parts])
    logs: list[ChangedElements] = []

    def write(target: dict[str, torch.Tensor] | ChangeLog) -> None:
        logs.clear()
        if isinstance(target, ChangeLog):
            target.clear()
        writer = DeviceWriter(device, live, target, Targets.of(places))
        launches = Launches(device)
        for part in parts:
            writer.write([part], logs.append, launches)
            launches.run()

    note("decode and write into the shadow weights", lambda: write(shadow))
    note("copy logged elements", lambda: copy_elements(logs, live, shadow))
    logs.clear()
    shadow.clear()
    log = ChangeLog(device, int(gib * (1 << 30) * max(share * 4, 0.01)))
    note("decode and write into the log", lambda: write(log))
    log.require_room()
    swap = Swap(log, live)
    note("swap", swap)
    if swap._is_back:
        swap()
    known, tables, named = KnownDestinations(), KnownTables(), list(new.items())
    came = [
        Came(name, place.entry, tensor)
        for place, (name, tensor) in zip(places, named, strict=True)
    ]

    def compare() -> None:
        log.clear()
        comparison = Comparison(log, live, known, tables)
        batch: list[Came] = []
        for each in came:
            batch.append(each)
            if sum(one.tensor.nbytes for one in batch) >= 256 << 20:
                comparison.log_differences(batch)
                batch = []
        comparison.log_differences(batch)

    note("compare whole tensors", compare)
    found["digest of all"] = timed(lambda: digests_of(named))
    tensors = list(live.values())
    other = [torch.empty_like(t) for t in tensors]
    found["copy of all"] = timed(
        lambda: [a.copy_(b) for a, b in zip(other, tensors, strict=True)]
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=15.3)
    parser.add_argument("--shares", nargs="+", default=["0.001", "0.01", "0.03"])
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": facts(), "gib": options.gib, "ms": {}}
    for share in options.shares:
        found = measure(options.gib, float(share))
        report["ms"][share] = found
        print(share, json.dumps(found), flush=True)
    (options.out / "gpu-delta-kernels.json").write_text(
        json.dumps(report, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
