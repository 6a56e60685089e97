"""What a rank does about writes into what it serves, past any update.

Upstream's `reload_weights` and `reset_weights` write there, and so may a call of the
user's own. The tripwire (tripwire.py) notices it; the engine core asks for it by the
moves below, and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.inflight.errors import WrongPhase
from vllm.inflight.worker.integrity.tripwire import Tripwire, WriteReport, wire_of
from vllm.inflight.worker.lora import kept
from vllm.inflight.worker.step_tracker import between_steps

SOURCE = "model", "model_weights", "revision"
"""Fields of a model's config that a reload sets before it looks for the files."""


def note(layer: torch.nn.Module) -> None:
    """What comes next is written into `layer`, which a worker may serve."""
    if (wire := wire_of(layer)) is not None:
        wire.note()


def note_load(layer: torch.nn.Module) -> None:
    """A reload takes `layer` aside next, which a worker may serve."""
    if (wire := wire_of(layer)) is not None:
        wire.note_load()


def note_copied(layer: torch.nn.Module) -> None:
    """A reload has written all of `layer`, which a worker may serve."""
    if (wire := wire_of(layer)) is not None:
        wire.note_copied(layer)


@contextmanager
def overwriting(worker: Any) -> Iterator[None]:
    """Around upstream's calls that write: adapters stay loaded, and no step runs.

    Upstream lets adapters go when the weights below them change. A call that fails
    before its first write leaves the model's config as it was.
    """
    config = worker.vllm_config.model_config
    source = {field: getattr(config, field) for field in SOURCE}
    try:
        with between_steps(worker), kept(worker.model_runner):
            yield
    except BaseException:
        if not look(worker)["is_written"]:
            for field, value in source.items():
                setattr(config, field, value)
        raise


def refuse(method: str) -> None:
    """Refuse a phase of an update that is called on one rank alone.

    Raises:
        WrongPhase: always.

    """
    raise WrongPhase(
        f"Worker.{method} was called inside a call of the workers. Here an update is "
        "staged beside what is served, and the engine core leads it, so one rank "
        "cannot take a step of it alone; nothing was received. Call it by "
        f"collective_rpc({method!r}), LLM.{method} or POST /{method}"
    )


def refuse_second_set(*_: Any, **__: Any) -> None:
    """Refuse to load into the second set of weights outside of an update.

    Raises:
        WrongPhase: always.

    """
    raise WrongPhase(
        "the second set of weights is written by updates alone, and none has begun; "
        "load into model_runner.model, or begin with start_weight_update"
    )


def attach(worker: Any, path: str, num_ranks: int, is_eager: bool) -> None:
    """Let the tripwire of this rank tell on the board; see `Tripwire.attach`."""
    if (wire := wire_on(worker)) is not None:
        wire.attach(path, num_ranks, is_eager)


def arm(worker: Any) -> None:
    """See `Tripwire.arm`."""
    if (wire := wire_on(worker)) is not None:
        wire.arm()


def look(worker: Any) -> dict[str, Any]:
    """The report of the tripwire, as plain data; see `WriteReport`."""
    if (wire := wire_on(worker)) is None:
        return WriteReport().to_dict()
    if not wire.is_asleep:
        worker.synchronize_device()  # a call may have written on a stream of its own
    return wire.look().to_dict()


def overwritten(worker: Any) -> None:
    """Nobody knows what this rank serves, nor in what its second set differs."""
    if (wire := wire_on(worker)) is not None:
        wire.acknowledge()
    if (stager := getattr(worker, "_inflight_stager", None)) is not None:
        stager.forget(served=True)
        stager.shadow.behind.update(stager.shadow.required)


def put_back(worker: Any) -> dict[str, Any]:
    """Take what is served out of a load that has not ended; what has become of it.

    Else its parameters would have no memory, and nothing could be put into it.
    """
    if (wire := wire_on(worker)) is not None:
        wire.put_back()
    return look(worker)


def make_blank(worker: Any, keeps_some: bool) -> None:
    """Make weights blank that are lost, so that it can be seen what is written.

    Args:
        worker: of this rank.
        keeps_some: whether upstream has kept parameters over a sleep, by the patterns
            of its config.

    """
    config = worker.vllm_config.model_config
    patterns = config.sleep_preserve_parameter_names if keeps_some else ()
    if (wire := wire_on(worker)) is not None:
        wire.make_blank(patterns or ())
    if (stager := getattr(worker, "_inflight_stager", None)) is not None:
        stager.shadow.behind.update(stager.shadow.required)


def let_go(worker: Any) -> None:
    """See `Stager.let_go`."""
    if (stager := getattr(worker, "_inflight_stager", None)) is not None:
        stager.let_go()


def wire_on(worker: Any) -> Tripwire | None:
    """The tripwire of a worker; None if its models were loaded past upstream's way."""
    wire: Tripwire | None = getattr(worker, "_inflight_tripwire", None)
    return wire


MOVES: dict[str, Callable[..., Any]] = {
    "attach": attach,
    "arm": arm,
    "look": look,
    "overwritten": overwritten,
    "put_back": put_back,
    "make_blank": make_blank,
    "let_go": let_go,
}
"""What the engine core asks a rank for, by an RPC that replies in an envelope."""
