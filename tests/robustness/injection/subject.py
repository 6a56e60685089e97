"""The engine that faults are injected into, and all that has to hold after each."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from vllm import SamplingParams

from tests.robustness.injection.cells import Cell
from tests.robustness.injection.points import STALL_S, Trap
from tests.support.engines.probe import prompts
from tests.support.shared_memory import names, nothing_came
from tests.support.waiting import until
from vllm.inflight.errors import InflightError
from vllm.inflight.transport.waiting import in_background

SLACK_S = 30.0
"""Of a busy machine with two cores; updates have a deadline of twice that, which comes
at once where one stalls."""
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Subject:
    """An `LLM` that serves `old` again after every cell.

    Args:
        llm: the engine.
        folders: of the versions `old` and `new`.
        expected: what a fresh engine of `new` says.
        manifest: of `new`, with the digest of every tensor.
        trap: where faults are armed.

    """

    def __init__(
        self,
        llm: Any,
        folders: dict[str, Path],
        expected: list[list[int]],
        manifest: dict[str, Any],
        trap: Trap,
    ) -> None:
        self.llm, self.trap = llm, trap
        self._folders, self._manifest = folders, manifest
        self._core = llm.llm_engine.engine_core.engine_core
        self._truth: dict[str, Any] = {}
        for label in ("new", "old"):
            llm.update_weights_from_disk(str(folders[label]), label)
            self._truth[label] = self._served()[1:]
        assert self._truth["new"][0] == expected, "it does not serve what a fresh one"
        assert self._truth["old"] != self._truth["new"]
        self._known = names()
        self._held = self._holds()

    def survives(self, cell: Cell) -> None:
        """Run an update with the fault; check all that has to hold after it."""
        self._begin_anew()
        self.trap.arm(cell.point, cell.fault, cell.place)
        began = time.monotonic()
        updating = in_background(lambda: self._update(cell))
        if cell.fault == "stall":
            in_background(lambda: self._runs_out(cell))
        outputs = self.llm.generate(prompts(2), LONG, use_tqdm=False)
        while not updating.done():
            outputs += self.llm.generate(prompts(2), LONG, use_tqdm=False)
        code, took = updating.result(), time.monotonic() - began
        assert self.trap.disarm(), "the point was not reached"

        has_new = cell.outcome in ("committed", "told")
        assert code == {"told": "engine_fault"}.get(cell.outcome, cell.outcome)
        longest = STALL_S if cell.fault == "stall" else 0.0
        assert took < longest + SLACK_S, "it waited for longer than its deadline"
        # No request was lost, and every token is of one of the two.
        assert {len(o.outputs[0].token_ids) for o in outputs} == {40}
        spans = [s for o in outputs for s in o.outputs[0].weight_versions]
        assert {span.version for span in spans} <= {"old", "new"}
        label = "new" if has_new else "old"
        self.serves(label)
        told = self.llm.weight_update_status(str(cell))
        assert told["phase"] == ("committed" if has_new else "aborted")
        assert (told.get("result") is not None) == has_new
        assert told.get("error", {}).get("code") in (None, code)
        self.changes()
        self.leaves_nothing()

    def changes(self) -> None:
        """The next updates are served."""
        for label in ("new", "old"):
            self.llm.update_weights_from_disk(str(self._folders[label]), label)
            self.serves(label)

    def serves(self, label: str) -> None:
        """Completely, on all ranks, and called so."""
        told, said, digests = self._served()
        assert told == label
        assert said == self._truth[label][0], f"this is not what {label!r} says"
        assert digests == self._truth[label][1], "a rank serves something else"

    def leaves_nothing(self) -> None:
        """No thread, descriptor, shared memory or temporary file more than before."""
        try:
            until(lambda: self._holds() <= self._held)
        except AssertionError:
            raise AssertionError(f"left: {self._holds() - self._held}") from None
        nothing_came(self._known)

    def _update(self, cell: Cell) -> str:
        opening: dict[str, Any] = {"update_id": str(cell), "deadline_s": 2 * SLACK_S}
        if cell.fault == "other bytes":
            opening["manifest"] = self._manifest
        folder = str(self._folders["new"])
        try:
            self.llm.update_weights_from_disk(folder, "new", **opening)
        except InflightError as error:
            return error.code
        return "committed"

    def _runs_out(self, cell: Cell) -> None:
        """The deadline comes as soon as the update stalls."""
        until(lambda: self.trap.was_hit, "the point was not reached", 2 * SLACK_S)
        ledger = self._core.vllm_inflight.updates.ledger
        ledger.find(str(cell)).deadline = 0.0

    def _served(self) -> tuple[str, list[list[int]], list[str]]:
        outputs = self.llm.generate(prompts(2), SHORT, use_tqdm=False)
        labels = {s.version for o in outputs for s in o.outputs[0].weight_versions}
        (label,) = labels | {self.llm.get_weight_version()}
        read = self._core.model_executor.collective_rpc
        replies = read("inflight_read", args=("checksums", ()))
        digests = [reply["ok"]["per_gpu_checksum"] for reply in replies]
        return label, [list(o.outputs[0].token_ids) for o in outputs], digests

    def _begin_anew(self) -> None:
        """On the old weights, also where the cell before has failed."""
        self.trap.disarm()
        if self.llm.weight_update_status()["active"] is not None:
            self.llm.abort_weight_update()
        if self.llm.get_weight_version() != "old":
            self.llm.update_weights_from_disk(str(self._folders["old"]), "old")

    def _holds(self) -> Counter[str]:
        """How many of what, of this process and of its workers."""
        me = psutil.Process()
        workers = me.children(recursive=True)
        held = Counter(t.name for t in threading.enumerate() if is_ours(t.name))
        for each in (me, *workers):
            held[f"descriptors of {each.pid}"] = each.num_fds()
        for each in workers:
            held[f"threads of {each.pid}"] = each.num_threads()
        return held


def is_ours(name: str) -> bool:
    return name.startswith("inflight")
