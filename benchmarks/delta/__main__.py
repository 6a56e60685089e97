"""Speed and size of deltas: `python -m benchmarks.delta`, or `make bench-delta`.

It runs the sweep (sweep.py), then a short run of the steps of an optimiser (steps.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.delta import steps
from benchmarks.delta.sweep import sweep
from benchmarks.machine import facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--numel", type=int, default=1 << 23, help="of each tensor")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-steps", action="store_true", help="the sweep alone")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    steps.add_options(parser, size="22M", steps=10)
    parser.set_defaults(coded=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    report: dict[str, Any] = {"machine": facts()}
    report["sweep"] = sweep(device, options.tensors, options.numel, options.repeat)
    if not options.no_steps:
        torch.set_num_threads(2)
        report["steps"] = steps.measured(options)
    file = options.out / f"delta-{device.type}.json"
    file.write_text(json.dumps(report, indent=1) + "\n")

    from benchmarks.delta.chart import draw

    draw(report, file.with_suffix(".png"))
    print(f"Written: {file} and {file.with_suffix('.png')}")


if __name__ == "__main__":
    main()
