"""Places jobs on GPUs, and ends them at their limits with all their processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.gpu_lanes.jobs import ROOT, Job

MARK = "GPU_LANE"  # the variable of the environment that has a job's mark
FRESH = 'rm -f "$OUT".*; mkdir -p "$OUT"; exec > "$OUT.log" 2>&1 < /dev/null'
PYTEST = (
    # pytest-benchmark warns of lanes that look like those of xdist.
    '"$PYTHON" -m pytest -v -m gpu -p no:cacheprovider -p no:benchmark '
    "-o faulthandler_timeout=420 "
    "-p tests.support.gpu_lanes.plugin "
    '--lines="$OUT.jsonl" --junitxml="$OUT.xml" --passed="$PASSED"'
)
PACK_S = 30
STACKS_AFTER_S = "270"
"""For what the tests start: vLLM waits 300 s for a step, and then ends the engine."""


def pack(results: Path) -> None:
    """Write `done.tgz` anew: all that is in the folder of results so far."""
    new = results / "done.tgz.new"
    tar = ["tar", "-czf", f"{new}", "--exclude=./done.tgz*", "-C", f"{results}", "."]
    subprocess.run(tar, stderr=subprocess.DEVNULL)  # it warns of files that change
    new.rename(results / "done.tgz")


@dataclass(frozen=True)
class Lane:
    """A job that runs."""

    job: Job
    gpus: list[int]
    ends: float
    mark: str
    process: psutil.Popen

    def state(self) -> str:
        """How it ended, or that it has to; empty while it runs within its limit."""
        if (code := self.process.poll()) is not None:
            return f"ended with {code}"
        return "cut off" if time.monotonic() > self.ends else ""

    def end(self) -> None:
        """End what it started, its process group, and whatever has its mark."""
        for _ in range(3):  # one may start another meanwhile
            family = [self.process]
            with suppress(psutil.Error):
                family += self.process.children(recursive=True)
            for process in psutil.process_iter(["environ"]):
                if (process.info["environ"] or {}).get(MARK) == self.mark:
                    family.append(process)
            if not any(process.is_running() for process in family):
                break
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for process in family:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(family, timeout=3)


class Runner:
    """Runs jobs side by side, in their order, until the time is over."""

    def __init__(self, jobs: list[Job], gpus: list[str], seconds: float) -> None:
        self._waiting, self._gpus, self._lanes = list(jobs), gpus, list[Lane]()
        self._began, self._ends = time.monotonic(), time.monotonic() + seconds
        self._is_well, self._cores = True, sorted(os.sched_getaffinity(0))
        # An engine of the tests keeps two or three cores busy.
        self._most = max(2, min(22, len(self._cores) * 3 // 8))

    def run(self, results: Path, passed: Path = Path()) -> bool:
        """Run them all, without tests that passed; returns whether all went well."""
        packed = time.monotonic()
        try:
            while self._lanes or self._waiting:
                for job, gpus in self._next():
                    self._start(job, gpus, results.resolve() / job.name, passed)
                time.sleep(0.2)
                for lane in [each for each in self._lanes if each.state()]:
                    self._end(lane)
                if time.monotonic() - packed > PACK_S:
                    pack(results)
                    packed = time.monotonic()
        finally:
            for lane in list(self._lanes):
                self._end(lane)
            pack(results)
        return self._is_well

    def _next(self) -> Iterator[tuple[Job, list[int]]]:
        """Take the jobs that can start now, with their GPUs, from those that wait."""
        kept: set[int] = set()
        for job in list(self._waiting):
            is_quiet = any(lane.job.quiet for lane in self._lanes)
            if time.monotonic() + job.least > self._ends:
                self._waiting.remove(job)
                self._tell(job, "not begun, too little time is left", False)
            elif is_quiet if job.quiet else len(self._lanes) >= self._most:
                continue
            elif gpus := self._place(job, kept):
                self._waiting.remove(job)
                yield job, gpus
            elif job.alone:  # the jobs after it leave room for it
                kept |= set(job.on)

    def _place(self, job: Job, kept: set[int]) -> list[int]:
        """The GPUs for a job, those with the most room first; none if they are full."""
        used = dict.fromkeys(range(len(self._gpus)), 0.0)
        for lane in self._lanes:
            for gpu, share in zip(lane.gpus, lane.job.shares, strict=True):
                used[gpu] += share
        order = job.on or sorted(used, key=used.__getitem__)
        chosen = [gpu for gpu in order if gpu not in kept][: len(job.shares)]
        fits = [used[g] + s < 1.001 for g, s in zip(chosen, job.shares, strict=False)]
        return chosen if all(fits) and len(fits) == len(job.shares) else []

    def _start(self, job: Job, gpus: list[int], out: Path, passed: Path) -> None:
        command = job.command or f"{PYTEST} --shard={job.shard} {job.tests}"
        # The last cores are for one benchmark after the other, until none is left.
        jobs = [job, *self._waiting, *(lane.job for lane in self._lanes)]
        split = max(1, len(self._cores) - max(each.cores for each in jobs))
        cores = (job.cores and self._cores[split:]) or self._cores[:split]
        taskset = ["taskset", "-c", ",".join(map(str, cores))]
        env = os.environ | {
            MARK: f"{os.getpid()}-{job.name}",
            "CUDA_VISIBLE_DEVICES": ",".join(self._gpus[gpu] for gpu in gpus),
            "OUT": str(out),
            "PASSED": str(passed.resolve()),
            "PYTHON": sys.executable,
            "STACKS_AFTER_S": STACKS_AFTER_S,
            # As one of a dozen lanes of pytest-xdist: its engines ask for a part of the
            # memory, and it leaves alone what the engines of others have in /dev/shm.
            "PYTEST_XDIST_WORKER": f"gw{len(self._waiting)}",
            "PYTEST_XDIST_WORKER_COUNT": "1" if job.alone else "12",
        }
        shell = [*taskset, "bash", "-c", f"{FRESH}; {command}"]
        process = psutil.Popen(shell, cwd=ROOT, env=env, start_new_session=True)
        ends = min(self._ends, time.monotonic() + job.limit)
        self._lanes.append(Lane(job, gpus, ends, env[MARK], process))
        self._tell(job, f"began on {gpus}")

    def _end(self, lane: Lane) -> None:
        state = lane.state() or "cut off"
        lane.end()
        self._lanes.remove(lane)
        # pytest ends with 5 if all tests have passed before.
        self._tell(lane.job, state, state in ("ended with 0", "ended with 5"))

    def _tell(self, job: Job, what: str, is_well: bool = True) -> None:
        self._is_well &= is_well
        at = time.monotonic() - self._began
        print(f"{at:5.0f} s  {job.name}: {what}", flush=True)
