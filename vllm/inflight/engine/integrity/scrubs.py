"""Scrubs: the live weights are read back and compared with the committed digest.

The ranks read their live weights in slices, between steps (worker/integrity/scrub.py).
The engine core requests slices at a low pace and merges the results of the ranks. A
tensor that is spread over several ranks is compared as a whole. Parts that several
ranks hold must be equal.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from vllm.inflight import upstream
from vllm.inflight.background import Background
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.transaction import Update
from vllm.inflight.errors import EngineAsleep, EngineFault, UpdateBusy

DIFFERENT = "different"
PAUSE_S = 0.05
"""Pause between two slices of a scrub that no caller waits for."""
RETRY_S = 0.01
"""Pause before a new scrub, because the live weights changed during the last one."""
MOST_NAMED = 16
MISSING = EngineAsleep, UpdateBusy
"""Errors of weights that cannot be read: they sleep, or a reload is under way."""

logger = upstream.init_logger(__name__)

Result = dict[str, Any]


class Scrubs:
    """The scrubs of one engine core."""

    def __init__(self, core: upstream.EngineCore, controller: EngineContext) -> None:
        config = InflightConfig.of(core.vllm_config)
        self._controller = controller
        self._interval_s = config.scrub_interval_s
        self._is_always_due = config.verify == "served"
        self._num_relied_on = 0
        """The most replayed tensors of a version that a scrub was started for."""
        self._lock = threading.Lock()
        self._waiting: list[Future[Result]] = []
        self._thread: Background | None = None
        self._is_due = False
        """Whether a commit requires a scrub that no caller waits for."""
        self._is_postponed = False
        """Whether such a scrub met a sleep or a reload, and comes after it."""
        self._wake = threading.Event()
        self._is_closed = False
        self._num_changes = 0
        """The change count of the weights that the last scrub read."""
        self.last: Result | None = None
        """The result of the last scrub."""
        self.results: Counter[str] = Counter()
        """How many scrubs had which result."""
        if self._interval_s:
            with self._lock:
                self._ensure_thread()

    def verify(self) -> Future[Result]:
        """Scrub once; the Future is done when the ranks have read all live weights.

        A call during a scrub gets the result of the next scrub. The scrub under way may
        have read weights that have changed since.
        """
        self._controller.ranks.require_staging()
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.append(future)
            self._ensure_thread()
        self._wake.set()
        return future

    def committed(self, update: Update) -> None:
        """After a commit, scrub if `--inflight-verify served` or a replay requires it.

        A replay requires it if the version used more replay plans (replay_plan.py) than
        any scrubbed version before.
        """
        is_new = update.num_replayed > self._num_relied_on
        if is_new or self._is_always_due:
            self._num_relied_on = update.num_replayed
            with self._lock:
                self._is_due = True
                self._ensure_thread()
            self._wake.set()

    def woken(self) -> None:
        """The weights are back: scrub now if a sleep has kept a scrub from its end."""
        with self._lock:
            if not self._is_postponed:
                return
            self._is_postponed, self._is_due = False, True
            self._ensure_thread()
        self._wake.set()

    def state(self) -> Result | None:
        """The result of the last scrub; None if the live weights have changed since.

        A rename does not change the weights.
        """
        is_served = self._num_changes == self._controller.live_version.changes
        return self.last if is_served else None

    @property
    def differs(self) -> bool:
        """Whether a scrub found live weights that differ from their digest."""
        state = self.state()
        return state is not None and state["result"] == DIFFERENT

    @property
    def detail(self) -> str | None:
        """The difference that a scrub found, and the remedy; None without one."""
        if not self.differs:
            return None
        assert self.last is not None
        return (
            "the live weights are not what was committed under their label: "
            f"{', '.join(self.last['different'])}; publish all tensors of a version, "
            "or roll back"
        )

    def close(self) -> None:
        """End the thread; waiting calls fail."""
        self._close()
        if (thread := self._thread) is not None:
            thread.join(timeout=1.0)

    def _close(self) -> None:
        self._is_closed = True
        self._wake.set()

    # ------------------------------------------------------------- the thread
    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # Between two scrubs the thread has no reference that keeps the engine.
            engine = weakref.ref(self)
            self._thread = Background(
                partial(_work, engine, self._wake, self._interval_s or None),
                name="inflight-scrub",
                end=partial(_end, engine),
            )
            self._thread.start()

    def _turn(self) -> bool:
        """Scrub for waiting calls or on schedule; returns whether to continue."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            is_due, self._is_due = self._is_due, False
        if not self._is_closed:
            self._scrub(waiting, is_due=is_due)
            waiting = []
        with self._lock:
            if self._is_closed:
                waiting += self._waiting
                self._waiting = []
            goes_on = bool(self._waiting or self._is_due)
            if goes_on:
                self._wake.set()
            goes_on = not self._is_closed and (goes_on or bool(self._interval_s))
            if not goes_on:
                self._thread = None
        for future in waiting:
            future.set_exception(EngineFault("the engine has been shut down"))
        return goes_on

    def _scrub(self, waiting: list[Future[Result]], *, is_due: bool) -> None:
        try:
            is_asked = bool(waiting)
            once = partial(self._once, is_asked=is_asked, is_due=is_due)
            result = once(0.0 if is_asked else PAUSE_S)
            while result is None and (waiting or is_due):
                if self._is_closed:
                    raise EngineFault("the engine has been shut down")
                time.sleep(RETRY_S)
                result = once(0.0)
        except Exception as error:
            if not waiting and not isinstance(error, MISSING):
                logger.warning("the live weights could not be scrubbed: %s", error)
            for future in waiting:
                future.set_exception(error)
            return
        for future in waiting:
            assert result is not None
            future.set_result(result)

    def _once(self, pause_s: float, *, is_asked: bool, is_due: bool) -> Result | None:
        """Scrub once; None if the live weights changed meanwhile or are about to.

        Ranks that fall asleep meanwhile end their scrub, as its memory goes.
        """
        began = time.monotonic()
        begin = partial(self._begin, is_asked=is_asked, is_due=is_due)
        version = self._between_steps(begin)
        if version is None:
            return None
        num_changes = version.pop("num_changes")
        for _ in range(version.pop("num_slices")):
            if self._is_closed:
                return None
            if pause_s:
                time.sleep(pause_s)
            self._between_steps(self._controller.ranks.scrub_slice)
        end = partial(self._end, version, is_due=is_due)
        result: Result | None = self._between_steps(end)
        if result is not None:
            result["seconds"] = round(time.monotonic() - began, 3)
            self._num_changes = num_changes
            self._report(result)
        return result

    def _between_steps(self, call: Callable[[], Any]) -> Any:
        turns = self._controller.step_queue
        if self._controller.in_process:
            return turns.run(call)
        return turns.submit(call).result()

    @contextmanager
    def _noting_sleep(self, *, is_due: bool) -> Iterator[None]:
        """Note that a due scrub comes later, if its weights are missing.

        Between two steps, so that no `woken` comes between the look and the note.
        """
        try:
            yield
        except MISSING:
            with self._lock:
                self._is_postponed |= is_due
            raise

    def _begin(self, *, is_asked: bool, is_due: bool) -> Result | None:
        """Begin a scrub; None while a rank still computes where its tensors are.

        Raises:
            EngineAsleep: the weights sleep; or any memory, and no caller waits.
            UpdateBusy: a reload of the weights is under way.

        """
        with self._noting_sleep(is_due=is_due):
            sleep = self._controller.sleep
            sleep.check_weights(is_whole=False)
            if not (is_asked or sleep.may_decode):
                raise EngineAsleep("a part of the memory of this engine is asleep")
            num_slices = self._controller.ranks.scrub("begin")
        if any(each is None for each in num_slices):
            return None
        version = self._controller.version
        return {
            "weight_version": version.label,
            "epoch": version.epoch,
            "digest": version.digest,
            "num_slices": max(num_slices, default=0),
            "num_changes": self._controller.live_version.changes,
        }

    def _end(self, version: Result, *, is_due: bool) -> Result | None:
        """End a scrub; None if the live weights have changed since its begin."""
        with self._noting_sleep(is_due=is_due):
            self._controller.sleep.check_weights(is_whole=False)
        found = self._controller.ranks.scrub("result")
        if any(each is None for each in found):
            return None
        return version | judged(found)

    def _report(self, result: Result) -> None:
        self.results[result["result"]] += 1
        self.last = result | {"at": time.time()}
        facts = (
            result["weight_version"],
            result["epoch"],
            result["num_tensors"],
            result["num_parameters"],
            result["seconds"],
        )
        if result["result"] == DIFFERENT:
            logger.critical(
                "the live weights %r (epoch %d) are NOT what was committed under that "
                "label: %s; publish all tensors of a version, or roll back (%d tensors "
                "and %d parameters compared in %.2f s)",
                *facts[:2],
                ", ".join(result["different"]),
                *facts[2:],
            )
        else:
            logger.info(
                "weights %r (epoch %d) scrubbed: %s, %d tensors and %d parameters "
                "compared in %.2f s",
                *facts[:2],
                result["result"],
                *facts[2:],
            )


def _work(
    engine: weakref.ref[Scrubs], wake: threading.Event, interval_s: float | None
) -> None:
    goes_on = True
    while goes_on:
        wake.wait(interval_s)
        wake.clear()
        if (scrubs := engine()) is None:
            return
        goes_on = scrubs._turn()
        del scrubs


def _end(engine: weakref.ref[Scrubs]) -> None:
    if (scrubs := engine()) is not None:
        scrubs._close()


def judged(ranks: list[dict[str, Any]]) -> Result:
    """Merge the scrub results of the ranks of one engine.

    Args:
        ranks: the result of each rank; see `Scrub.result`.

    Returns:
        `result`: `equal`, `different`, or `unknown` if nothing could be compared.
        `num_tensors`: tensors compared with their digests. `num_parameters`: parameters
        compared with what was staged. `different`: at most 16 names that differ, and
        `num_different`. `unknown`: at most 16 names that could not be compared, and
        `num_unknown`.

    """
    # A pipeline stage, or a rank with some of the experts, has only some of the names.
    names = sorted({name for each in ranks for name in each["names"]})
    found = _Found.of(ranks, names)
    is_first, is_wrong = found.counted_once()
    num_covered = torch.zeros(len(names), dtype=torch.int64)
    num_covered.index_add_(0, found.owners[is_first], found.covered[is_first])
    total = torch.zeros(len(names), 2, dtype=torch.int64)
    total.index_add_(0, found.owners[is_first], found.sums[is_first])
    is_all = (num_covered == found.numel) & (found.numel > 0)
    is_wrong |= is_all & (total != found.expected).any(dim=1)
    different = {name for each in ranks for name in each["wrong"]}
    inexact = {name for each in ranks for name in each["inexact"]}
    is_unread = torch.tensor([name in inexact for name in names], dtype=torch.bool)
    found_wrong = (is_wrong & ~is_unread).nonzero().flatten().tolist()
    different |= {names[number] for number in found_wrong}
    is_unread &= is_wrong
    num_tensors = int((is_all & ~is_unread).sum())
    num_parameters = sum(each["num_marked"] for each in ranks)
    unknown = {name for each in ranks for name in each["unknown"]}
    in_part = ((num_covered > 0) & ~is_all).nonzero().flatten().tolist()
    in_part += is_unread.nonzero().flatten().tolist()
    unknown |= {names[number] for number in in_part}
    result = "equal" if num_tensors or num_parameters else "unknown"
    return {
        "result": DIFFERENT if different else result,
        "num_tensors": num_tensors,
        "num_parameters": num_parameters,
        "num_unknown": len(unknown),
        "unknown": sorted(unknown)[:MOST_NAMED],
        "num_different": len(different),
        "different": sorted(different)[:MOST_NAMED],
    }


@dataclass(frozen=True, slots=True)
class _Found:
    """The scrub results of all ranks, as arrays; see `Scrub.result`."""

    owners: torch.Tensor
    """For each part that a rank serves, the index of its name."""
    parts: torch.Tensor
    sums: torch.Tensor
    covered: torch.Tensor
    expected: torch.Tensor
    """For each name."""
    numel: torch.Tensor

    @classmethod
    def of(cls, ranks: list[dict[str, Any]], names: list[str]) -> Self:
        """Read the replies of the ranks, in the order of `names`."""
        numbers = {name: number for number, name in enumerate(names)}
        expected = torch.zeros(len(names), 2, dtype=torch.int64)
        numel = torch.zeros(len(names), dtype=torch.int64)
        served: list[tuple[torch.Tensor, ...]] = []
        for each in ranks:
            at = torch.tensor([numbers[n] for n in each["names"]], dtype=torch.int64)
            covered, owners = _read(each["covered"]), _read(each["owners"])
            is_here = covered > 0
            here = owners[is_here].unique()
            expected[at[here]] = _read(each["expected"], 2)[here]
            numel[at[here]] = _read(each["numel"])[here]
            parts, sums = _read(each["parts"]), _read(each["sums"], 2)
            served.append(
                (at[owners][is_here], parts[is_here], sums[is_here], covered[is_here])
            )
        owners, parts, sums, covered = map(torch.cat, zip(*served, strict=True))
        return cls(owners, parts, sums, covered, expected, numel)

    def counted_once(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts, each from the first rank that serves it.

        Returns:
            for each part, whether it is the first of its kind; and for each name,
            whether two ranks serve one part of it in different forms.

        """
        numbers = torch.arange(len(self.parts))
        kinds, kind = self.parts.unique(return_inverse=True)
        first = torch.full_like(kinds, len(numbers))
        first = first.scatter_reduce(0, kind, numbers, "amin")[kind]
        is_wrong = torch.zeros(len(self.numel), dtype=torch.bool)
        is_wrong[self.owners[(self.sums != self.sums[first]).any(dim=1)]] = True
        return first == numbers, is_wrong


def _read(packed: bytes, width: int | None = None) -> torch.Tensor:
    """Numbers of a reply, in rows of `width`."""
    if not packed:
        return torch.zeros((0,) if width is None else (0, width), dtype=torch.int64)
    numbers = torch.frombuffer(bytearray(packed), dtype=torch.int64)
    return numbers if width is None else numbers.view(-1, width)
