"""Our state on one worker: its shadow model, staging worker, tripwire and adapter.

The parts of `worker/` create these objects. Protocols declare what others use of them,
so that no module imports another in a circle. mypy checks that each class satisfies its
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.inflight.attached import AttachedOnDemand
from vllm.inflight.errors import WrongPhase
from vllm.inflight.messages import Command, FlipTo

if TYPE_CHECKING:
    import torch


class SentNames(Protocol):
    """Names that a trainer may send, see `verify.ignored_tensors.IgnoredTensors`."""

    def __contains__(self, name: str) -> bool:
        """Whether a tensor with this name is ignored."""

    def has_left_out(self, name: str) -> bool:
        """Whether the model leaves out a part that has a tensor of this name."""

    def is_tied(self, name: str) -> bool:
        """Whether the tensor is equal to a parameter."""


class Shadow(Protocol):
    """The shadow model, see `shadow.shadow_model.ShadowModel`."""

    live: torch.nn.Module
    module: torch.nn.Module | None
    """None without shadow weights."""
    required: dict[str, torch.Size]
    """The shapes of the parameters that an update has to write, by name."""
    stale: set[str]
    """The parameters whose shadow is not a copy of the live weights."""

    @property
    def ignored(self) -> SentNames:
        """The tensors of an update that the engine ignores."""


class Steps(Protocol):
    """The steps of the worker, see `step_tracker.StepTracker`."""

    stream: torch.cuda.Stream | None
    """The stream of the last step, on a GPU."""

    def running(self) -> AbstractContextManager[None]:
        """Context: its body is a step, or a part of one."""

    def between(self) -> AbstractContextManager[None]:
        """Context: its body comes after the last step, and ends before the next."""


class Extension(Protocol):
    """The calls of a worker's extension, see `adopted.extension.ExtensionCalls`."""

    def take(self, serial: int, number: int) -> list[Any]:
        """The result of a call, in a list; the list is empty if there is none."""


class Stager(Protocol):
    """What stages updates, see `staging.worker.StagingWorker`."""

    @property
    def extension(self) -> Extension:
        """The calls of the worker's extension."""

    @property
    def steps(self) -> Steps:
        """The steps of its worker."""

    @property
    def shadow(self) -> Shadow:
        """What it stages updates in."""

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of a GPU that buckets take beside one set of weights."""

    @property
    def is_busy(self) -> bool:
        """Whether an update is being staged, or has not let go yet."""

    def attach(self, board_path: str, num_ranks: int) -> dict[str, Any]:
        """Open the status board; returns what this rank supports."""

    def names(self) -> dict[str, Any] | None:
        """What a trainer may send, see `catalogue.py`."""

    def command(self, serial: int, command: Command) -> None:
        """Enqueue one command of update `serial`."""

    def flip(self, to: FlipTo = "next") -> float:
        """Exchange the live weights with others; returns the seconds it took."""

    def scrub(self, move: str) -> Any:
        """Make one move of a scrub."""

    def end_reads(self) -> None:
        """End a scrub, and wait for what is enqueued, before memory is given back."""

    def forget(self, *, served: bool) -> None:
        """Release the shadow weights, and with `served` the live weights as well."""

    def fall_asleep(self, *, keeps_weights: bool) -> None:
        """Release what a sleep of the live weights takes with it."""

    def let_go(self) -> None:
        """Return when nothing works on the shadow weights any more."""

    def close(self) -> None:
        """End the staging thread."""


Adopter = Callable[[Iterable[Any]], set[str] | None]
"""Loads tensors in place of a live model, and returns their names. It returns None,
and has taken no tensor, if they are to be loaded into the live model."""


class WriteWatch(Protocol):
    """What notices out-of-band writes, see `integrity.tripwire.Tripwire`."""

    is_filling: bool
    """Whether an update fills lost weights in place."""
    adopter: Adopter | None
    """What loads in place of the live model; None if nothing does."""
    before_load: Callable[[], None] | None
    """Called before a live model is loaded into; None if nothing is."""

    @property
    def is_asleep(self) -> bool:
        """Whether the memory of the weights is given back."""

    def note_asleep(self, parts: Collection[str], kept: Collection[str]) -> None:
        """Parts of the memory are given back now."""

    def note_awake(self, parts: Collection[str] | None, kept: Iterable[str]) -> None:
        """Parts have memory again."""

    def acknowledge_sleep(
        self, woken: Collection[str] | None = None, lost: Collection[str] | None = None
    ) -> None:
        """Note that the engine core knows of the sleep."""

    def attach(self, board_path: str, num_ranks: int, is_eager: bool) -> None:
        """Open the status board."""

    def note(self) -> None:
        """Live weights are being written, or were."""

    def arm(self) -> None:
        """Take the reference, unless there is one."""

    def warmed_up(self) -> None:
        """Note which parameters steps write themselves, as the first have run."""

    def changed(self) -> None:
        """Note a change of the weights that the engine core knows."""

    def begin_fill(self) -> None:
        """Note that an update begins to fill lost weights in place."""

    def end_fill(self) -> None:
        """Note that it has written the last of them."""

    def look(self) -> Any:
        """Compare the weights with the reference; returns a `WriteReport`."""

    def acknowledge(self) -> None:
        """Note that the engine core knows of the write."""

    def put_back(self) -> None:
        """Take the live model out of a reload that has not ended."""

    def put_back_for_step(self) -> None:
        """End a reload if a step comes in the middle of it."""

    def make_blank(self, kept: Iterable[str] = ...) -> None:
        """Make the weights blank, so that writes into them can be told."""


class Proposal(Protocol):
    """An adapter that has been read, see `lora.AdapterProposal`."""

    def take(self) -> None:
        """Load it."""

    def put_back(self) -> None:
        """Load the adapter from before again."""


@dataclass(slots=True)
class WorkerState(AttachedOnDemand):
    """The objects of one rank; they end with its worker."""

    shadow: Shadow | None = None
    """The shadow model of its model; None until the model is loaded."""
    stager: Stager | None = None
    """None until the model is loaded, and with `--inflight-staging off`."""
    tripwire: WriteWatch | None = None
    """None if its models were not loaded by upstream's loader."""
    proposal: Proposal | None = None
    """The adapter that is being loaded; None if none is."""

    def require_stager(self) -> Stager:
        """The staging worker.

        Raises:
            WrongPhase: there is none.

        """
        if self.stager is None:
            raise WrongPhase(
                "this rank stages no updates; start the engine without "
                "--inflight-staging off"
            )
        return self.stager
