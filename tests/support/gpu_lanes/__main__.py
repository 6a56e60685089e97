"""Runs the tests of tests/gpu and the benchmarks side by side, on a host's GPUs.

The results of a job are NAME.log, a line of JSON for each test in NAME.jsonl, NAME.xml
for JUnit if it ran to its end, and a folder. `done.tgz` has all of it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

from tests.support.gpu_lanes.jobs import jobs
from tests.support.gpu_lanes.jsonl import lines
from tests.support.gpu_lanes.runner import Runner
from tests.support.shared_memory import sweep


def merge(archive: Path, results: Path, passed: Path) -> None:
    """Print what tests came to, unpack their results, and add to the list `passed`."""
    outcomes: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            content = getattr(tar.extractfile(member), "read", bytes)()
            if member.name.endswith((".xml", ".jsonl")):
                unpacked = results / Path(member.name).name
                unpacked.write_bytes(content)
                os.utime(unpacked, (member.mtime, member.mtime))  # when the tests ran
            for line in lines(content) if member.name.endswith(".jsonl") else ():
                if outcomes.get(line["id"]) != "failed":  # in any of the jobs
                    outcomes[line["id"]] = line["outcome"]
                if line["outcome"] == "failed":
                    print(f"FAILED {line['id']}\n{line['told'][-1500:]}\n")
    counts = Counter((test.partition("::")[0], o) for test, o in outcomes.items())
    for (file, outcome), number in sorted(counts.items()):
        print(f"{file}: {number} {outcome}")
    had = set(json.loads(passed.read_text())) if passed.is_file() else set()
    had |= {test for test, outcome in outcomes.items() if outcome == "passed"}
    if passed.name:
        passed.write_text(json.dumps(sorted(had), indent=0))


def main() -> int:
    """What the command line asks for; returns the status to exit with."""
    parser = argparse.ArgumentParser("python -m tests.support.gpu_lanes", None, __doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=1400, help="for all jobs")
    add("--results", type=Path, default=Path("out/gpu"), help="a folder")
    add("--only", nargs="+", default=[""], help="jobs whose names begin so")
    add("--gpus", type=int, help="use the first so many")
    add("--passed", type=Path, default=Path(), help="JSON list of tests to leave out")
    add("--merge", type=Path, metavar="ARCHIVE", help="read a done.tgz, run nothing")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    if options.merge:
        merge(options.merge, options.results, options.passed)
        return 0
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(",", " ")
    gpus = (named or subprocess.check_output(query, text=True)).split()[: options.gpus]
    names = tuple(options.only)
    chosen = [job for job in jobs(len(gpus)) if job.name.startswith(names)]
    if not chosen:
        parser.error(f"no job for {len(gpus)} GPUs begins with {' or '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # it ends the jobs, too
    began, runner = time.time(), Runner(chosen, gpus, options.seconds)
    is_well = runner.run(options.results, options.passed)
    sweep(began)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
