"""Reaches the named points of an update in every process of an engine.

`install` wraps the functions that stand at the points. What happens there is read from
a file that the test writes when it arms a cell; without one, nothing does. Processes
that vLLM starts load this as a plugin of theirs (see `plugin`).
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from vllm.inflight import ops

ENV = "TESTS_INJECTION"
NUM_TENSORS = 25
"""Of the model that is updated."""
AT = {"first byte": 1, "mid-stream": NUM_TENSORS // 2, "last byte": NUM_TENSORS}
STALL_S = 4.0
DAY_S = 86_400.0

_clock = time.time
_put: Callable[[Any, str, Any], None] = setattr
"""How something is put in the place of something: see `install`."""


def plugin(folder: Path) -> str:
    """Make `folder` a PYTHONPATH whose processes of vLLM load this file."""
    info = folder / "injection-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: injection\n")
    entry = "[vllm.general_plugins]\n"
    entry += "injection = tests.robustness.injection.points:install\n"
    (info / "entry_points.txt").write_text(entry)
    return str(folder)


class Trap:
    """The test's hand on the points.

    Args:
        folder: where what is armed, and what was hit, is written down.
        put: what `install` takes.

    """

    def __init__(self, folder: Path, put: Any = setattr) -> None:
        self.put = put
        self._armed = folder / "armed"
        self._hit = folder / "hit"

    def arm(self, point: str, fault: str, place: str) -> None:
        """From now on `fault` happens, once, at `point` of `place`."""
        self.disarm()
        facts = {"point": point, "fault": fault, "place": place}
        part = self._armed.with_suffix(".part")
        part.write_text(json.dumps(facts))
        part.rename(self._armed)

    def disarm(self) -> bool:
        """Nothing happens any more; whether anything has."""
        self._armed.unlink(missing_ok=True)
        was_hit = self._hit.exists()
        self._hit.unlink(missing_ok=True)
        return was_hit

    def take(self, point: str, places: set[str]) -> str | None:
        """The fault to do now at `point`, which it is done at once only."""
        try:
            facts = json.loads(self._armed.read_text())
        except FileNotFoundError:
            return None
        if facts["point"] != point or facts["place"] not in places:
            return None
        try:
            self._hit.touch(exist_ok=False)
        except FileExistsError:
            return None
        return str(facts["fault"])

    @property
    def was_hit(self) -> bool:
        """Whether what was armed has happened."""
        return self._hit.exists()

    @property
    def is_armed(self) -> bool:
        return self._armed.exists()


def trap() -> Trap:
    """That of this process, by its environment."""
    return Trap(Path(os.environ[ENV]))


def happen(point: str, places: set[str]) -> str | None:
    """Where a point is reached: do what is armed there, if that is a fault of code.

    Returns the fault: one of data is for whoever has the data.
    """
    fault = trap().take(point, places)
    if fault == "exception":
        raise RuntimeError(f"injected at {point}")
    if fault == "out of memory":
        raise torch.OutOfMemoryError(f"injected at {point}")
    if fault == "stall":
        time.sleep(STALL_S)
    if fault == "long stall":
        time.sleep(8 * STALL_S)
    if fault == "no end":
        time.sleep(DAY_S)
    if fault == "clock jump":
        # Until it is disarmed; in every module that asks for the time of day.
        jumped = lambda: _clock() + (DAY_S if trap().is_armed else 0.0)  # noqa: E731
        _put(time, "time", jumped)
    if fault is not None and fault.startswith("SIGKILL"):
        _kill(fault.removeprefix("SIGKILL "))
    return fault


def _kill(victim: str) -> None:
    """A trainer by its process id; a rank's parent is the engine core, whose parent is
    the API server.
    """
    if victim.isdigit():
        os.kill(int(victim), signal.SIGKILL)
        return
    core = os.getppid()
    if victim == "API server":
        with open(f"/proc/{core}/stat") as stat:
            os.kill(int(stat.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
        return
    os.kill(core if victim == "engine core" else os.getpid(), signal.SIGKILL)


def _names(config: Any, rank: int | None) -> set[str]:
    """What the places here are called: the same process can be several."""
    parallel = config.parallel_config
    if rank is None:
        return {"core of one rank" if parallel.world_size == 1 else "core of 2"}
    names = {f"rank {rank} of {parallel.world_size}", f"rank {rank}"}
    if parallel.world_size == 1:
        # Of a dense model an engine is not told that it is one of several.
        names |= {"one rank", f"engine {parallel.data_parallel_index} of 2"}
    return names


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Wrap the functions at the points, once in a process.

    Args:
        put: `setattr`, or one that can be undone.

    """
    from vllm.inflight.engine.pause.pause import Pauses
    from vllm.inflight.engine.update import live_version, monitor, ranks
    from vllm.inflight.worker.delta.writer import DeltaWriter
    from vllm.inflight.worker.staging.loader import UpdateLoader
    from vllm.inflight.worker.staging.thread import StagingThread
    from vllm.inflight.worker.staging.worker import StagingWorker

    global _put
    if hasattr(StagingThread.run, "tests_are_here"):
        return
    _put = put
    run = StagingThread.run

    @wraps(run)
    def marked(self: Any) -> None:
        run(self)

    marked.tests_are_here = True
    put(StagingThread, "run", marked)

    def at(owner: Any, name: str, point: str, places: Callable[..., set[str]]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            happen(point, places(*args))
            return original(*args, **kwargs)

        put(owner, name, wrapped)

    def of_job(job: Any, *_: Any) -> set[str]:
        return of_worker(job._worker)

    def of_stager(stager: Any, *_: Any) -> set[str]:
        return of_worker(stager.worker)

    def of_worker(worker: Any) -> set[str]:
        return _names(worker.vllm_config, worker.rank)

    def of_thread(*_: Any) -> set[str]:
        job: Any = threading.current_thread()
        return of_worker(job._worker)

    def of_served(it: Any, *_: Any) -> set[str]:
        return _names(it._core.vllm_config, None)

    at(StagingThread, "_start", "begin", of_job)
    at(StagingThread, "_prepare", "verify", of_job)
    at(DeltaWriter, "_write", "decode", of_thread)
    at(DeltaWriter, "problems", "prove", of_thread)
    at(StagingWorker, "staged", "vote", of_stager)
    at(StagingWorker, "flip", "before the flip", of_stager)
    at(live_version.LiveVersion, "advance", "before the flip", of_served)
    at(live_version.LiveVersion, "_take_on", "after the flip", of_served)
    at(Pauses, "treat", "reply", of_served)
    _in_stream(UpdateLoader)
    _around_flip(StagingWorker, of_stager)
    _in_core(ranks.Ranks, monitor)


def _in_stream(intake: Any) -> None:
    load = intake.load_weights

    def load_weights(self: Any, weights: Any) -> Any:
        worker = self._progress.__self__._worker
        places = _names(worker.vllm_config, worker.rank)
        return load(self, _altered(weights, places))

    _put(intake, "load_weights", load_weights)


def _altered(weights: Any, places: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    points = {number: point for point, number in AT.items()}
    for number, (name, tensor) in enumerate(weights, 1):
        if number not in points:
            yield name, tensor
            continue
        fault = happen(points[number], places)
        if fault == "left out":
            continue
        if fault == "NaN":
            tensor = torch.full_like(tensor, float("nan"))
        elif fault == "other bytes":
            tensor = tensor + 1
        elif fault == "other name":
            name = name.replace("weight", "wait")
        elif fault == "cut off":
            tensor = tensor[:-1]
        elif fault == "sent twice":
            yield name, tensor
        yield name, tensor


class _Tripwire:
    """A parameter of the second set whose exchange is the middle of a flip."""

    def __init__(self, tensor: torch.Tensor, places: set[str]) -> None:
        self._tensor, self._places = tensor, places

    @property
    def data(self) -> torch.Tensor:
        return self._tensor.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        happen("inside the flip", self._places)
        self._tensor.data = value


class _Halved:
    """The swap of a log on the host, with a pause in its middle."""

    def __init__(self, swap: Any, places: set[str]) -> None:
        self._swap, self._places = swap, places

    def __call__(self) -> Any:
        swap, rows = self._swap, self._swap._rows
        half = len(rows) // 2
        terms, total = ops.Digest.ZERO, 0
        for first, end in ((0, half), (half, len(rows))):
            swap._rows = rows[first:end]
            try:
                found, total = swap()
            finally:
                swap._rows = rows
            terms += found
            if not first and half:
                happen("inside the flip", self._places)
        return terms, total


def _around_flip(stager: Any, of_stager: Callable[[Any], set[str]]) -> None:
    flip = stager.flip

    def flipped(self: Any, to: str) -> float:
        chosen = self._turned(to)[0]
        if (swap := getattr(chosen, "_swap", None)) is not None:
            chosen._swap = _Halved(swap, of_stager(self))
            try:
                seconds = float(flip(self, to))
            finally:
                chosen._swap = swap
            happen("after the flip", of_stager(self))
            return seconds
        pairs = getattr(chosen, "_params", None)
        if pairs is None:
            return float(flip(self, to))
        middle = len(pairs) // 2
        live, second = pairs[middle]
        pairs[middle] = live, _Tripwire(second, of_stager(self))
        try:
            seconds = float(flip(self, to))
        finally:
            pairs[middle] = live, second
        happen("after the flip", of_stager(self))
        return seconds

    _put(stager, "flip", flipped)


def _in_core(ranks: Any, watch: Any) -> None:
    command, agree = ranks.command, watch.agree

    def commanded(self: Any, serial: int, what: Any) -> None:
        if what.name == "start":
            happen("begin", _core_of(self._board.num_ranks))
        command(self, serial, what)

    def agreed(statuses: Any, *args: Any) -> Any:
        happen("vote", _core_of(len(statuses)))
        return agree(statuses, *args)

    _put(ranks, "command", commanded)
    _put(watch, "agree", agreed)


def _core_of(num_ranks: int) -> set[str]:
    return {"core of one rank" if num_ranks == 1 else "core of 2"}
