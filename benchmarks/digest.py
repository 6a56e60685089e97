"""GB/s of the native ops beside what the memory can do: `python -m benchmarks.digest`.

Method: one bf16 tensor far larger than the caches, best of `--repeat` runs after one
that warms up. "read" is torch's sum of the same bytes as int64, "copy" counts the bytes
read once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from vllm.inflight import _C, ops


def rate(work: Callable[[], object], num_bytes: int, repeat: int) -> float:
    """Best GB/s."""
    work()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return num_bytes / min(seconds) / 1e9


def measure(mib: int, repeat: int, num_threads: int) -> dict[str, float]:
    torch.set_num_threads(num_threads)
    data = torch.randn(mib << 19).bfloat16()
    room = torch.empty_like(data)
    fastest, *others = _C.kernels()
    threads = {"num_threads": num_threads}
    work: dict[str, Callable[[], object]] = {
        "read": data.view(torch.int64).sum,
        "copy": lambda: room.copy_(data),
        "torch.sum, bf16": data.sum,
        "torch.isfinite": lambda: torch.isfinite(data).all(),
        f"digest, {fastest}": lambda: ops.digest([data], **threads),
        "count_nonfinite": lambda: ops.count_nonfinite([data], **threads),
    }
    rates = {name: rate(run, data.nbytes, repeat) for name, run in work.items()}
    for name in others:
        _C.use_kernel(name)
        rates[f"digest, {name}"] = rate(
            lambda: ops.digest([data], **threads), data.nbytes, repeat
        )
    _C.use_kernel(fastest)
    part = data[: 1 << 20]
    rates["digest, torch reference"] = rate(
        lambda: ops.digest_reference(part), part.nbytes, repeat
    )
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    columns = [measure(args.mib, args.repeat, n) for n in args.threads]
    print(f"{'GB/s':<26}" + "".join(f"{n:>4} threads" for n in args.threads))
    for name in columns[0]:
        print(f"{name:<26}" + "".join(f"{column[name]:>12.1f}" for column in columns))


if __name__ == "__main__":
    main()
