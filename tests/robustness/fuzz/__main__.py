"""`python -m tests.robustness.fuzz --inputs 1000000`: inputs for all parsers."""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter

from tests.robustness.fuzz.parsers import PARSERS

SHOWN = 400


def main() -> int:
    """Feed every parser; 1 if one of them raised what is no refusal."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--inputs", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=PARSERS, nargs="*", default=list(PARSERS))
    options.add_argument("--most-seconds", type=float, default=600, help="of a parser")
    asked = options.parse_args()
    total = 0
    bugs: Counter[str] = Counter()
    for name in asked.only:
        began, accepted, fed = time.monotonic(), 0, 0
        share = asked.inputs // len(asked.only) + 1
        for given in PARSERS[name].inputs(name, share, asked.seed):
            if fed % 64 == 0 and time.monotonic() - began > asked.most_seconds:
                break
            fed += 1
            try:
                accepted += PARSERS[name].accepts(given)
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{name}: {type(error).__name__} at {frame.name}:{frame.lineno}"
                if where not in bugs:
                    print(f"{where}: {error!s:.200}\n  by {given!r:.{SHOWN}}")
                bugs[where] += 1
        total += fed
        seconds = time.monotonic() - began
        print(f"{name:10} {fed:9,} inputs, {accepted:9,} accepted, {seconds:6.1f} s")
    print(f"{total:,} inputs, {bugs.total()} raised what is no refusal")
    return bool(bugs)


raise SystemExit(main())
