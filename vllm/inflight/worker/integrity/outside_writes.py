"""What a rank does about writes into its live weights that no update makes.

Upstream's `reload_weights` and `reset_weights` write there, and a call of the user may.
The tripwire (tripwire.py) notices such a write. The engine core asks for the calls
below, and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import UpdateBusy, WrongPhase
from vllm.inflight.frameworks.known_call import located, methods_of
from vllm.inflight.frameworks.table import known_calls, matched
from vllm.inflight.update import WEIGHTS
from vllm.inflight.worker.integrity.tripwire import WriteReport, tripwire_of
from vllm.inflight.worker.lora import kept
from vllm.inflight.worker.step_tracker import between_steps
from vllm.inflight.worker.worker_state import Adopter, WorkerState, WriteWatch

SOURCE = "model", "model_weights", "revision"
"""Fields of a model's config that a reload sets before it looks for the files."""


def note(layer: torch.nn.Module) -> None:
    """Tell the tripwire that `layer`, which may be live, is about to be written."""
    if (tripwire := tripwire_of(layer)) is not None:
        tripwire.note()


def note_load(layer: torch.nn.Module) -> None:
    """Tell the tripwire that a reload sets `layer` aside, which may be live."""
    if (tripwire := tripwire_of(layer)) is not None:
        tripwire.note_load()


def note_copied(layer: torch.nn.Module) -> None:
    """Tell the tripwire that a reload has written all of `layer`, which may be live."""
    if (tripwire := tripwire_of(layer)) is not None:
        tripwire.note_copied(layer)


@contextmanager
def overwriting(worker: upstream.WorkerBase) -> Iterator[None]:
    """Context around upstream's calls that write: adapters stay loaded, and no step
    runs.

    Upstream drops adapters when the weights below them change. If a call fails before
    its first write, the model's config is restored.
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
    """Reject a step of an update that is called on one rank alone.

    Raises:
        WrongPhase: always.

    """
    raise WrongPhase(
        f"Worker.{method} was called inside a call of the workers. Here an update is "
        "staged beside the live weights, and the engine core leads it, so one rank "
        "cannot take a step of it alone; nothing was received. Call it by "
        f"collective_rpc({method!r}), LLM.{method} or POST /{method}"
    )


def reject_load(*_: object, **__: object) -> None:
    """Reject a load into the shadow model outside of an update.

    Raises:
        WrongPhase: always.

    """
    raise WrongPhase(
        "the shadow weights are written by updates alone, and none has begun; "
        "load into model_runner.model, or begin with start_weight_update"
    )


def note_asleep(
    worker: upstream.WorkerBase, parts: Collection[str], kept: Collection[str]
) -> None:
    """Note that memory is given back, before it is; see `Tripwire.note_asleep`.

    Raises:
        UpdateBusy: an update is being staged, which reads the weights.

    """
    state = WorkerState.of(worker)
    stager, tripwire = state.stager, state.tripwire
    if stager is not None:
        is_asleep = tripwire is not None and tripwire.is_asleep
        falls_asleep = WEIGHTS in parts and not is_asleep
        if falls_asleep and stager.is_busy:
            raise UpdateBusy(
                "a call on this worker puts the weights to sleep while an update is "
                "staged; abort the update first, or use POST /sleep, which does"
            )
        stager.end_reads()
        if falls_asleep:
            stager.fall_asleep(keeps_weights=WEIGHTS in kept)
    if tripwire is not None:
        tripwire.note_asleep(parts, kept)


def note_awake(
    worker: upstream.WorkerBase,
    parts: Collection[str] | None,
    *,
    keeps_some: bool = False,
) -> None:
    """Note that parts have memory again; see `Tripwire.note_awake` and `make_blank`."""
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.note_awake(parts, kept_over_sleep(worker) if keeps_some else ())


def acknowledge_sleep(
    worker: upstream.WorkerBase,
    woken: Collection[str] | None = None,
    lost: Collection[str] | None = None,
) -> None:
    """See `Tripwire.acknowledge_sleep`."""
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.acknowledge_sleep(woken, lost)


def attach(
    worker: upstream.WorkerBase, path: str, num_ranks: int, is_eager: bool
) -> None:
    """Let the tripwire of this rank use the status board; see `Tripwire.attach`."""
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.attach(path, num_ranks, is_eager)


def adopt_loads(worker: upstream.WorkerBase, adopter: Adopter) -> None:
    """Let `adopter` load in place of the live model; see `Adopter`."""
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.adopter = adopter


def announce_loads(
    worker: upstream.WorkerBase, before_load: Callable[[], None]
) -> None:
    """Call `before_load` before the live model is loaded into."""
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.before_load = before_load


def methods(worker: upstream.WorkerBase) -> dict[str, list[str]]:
    """The methods of the worker that known calls name; see `methods_of`.

    Raises:
        ConfigError: an entry point names no known call.

    """
    return methods_of(type(worker), known_calls())


def missing_load_steps(worker: upstream.WorkerBase) -> list[str]:
    """The load steps of known calls of the worker that its framework does not have.

    They matter for a quantised model alone, and to look for them imports the framework.
    """
    if not worker.vllm_config.model_config.is_quantized:
        return []
    rows = matched(methods(worker))
    steps = {step for row in rows for step in row.load_steps}
    return sorted(step for step in steps if located(step) is None)


def arm(worker: upstream.WorkerBase) -> None:
    """See `Tripwire.arm`."""
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.arm()


def look(worker: upstream.WorkerBase) -> dict[str, Any]:
    """The report of the tripwire, as plain data; see `WriteReport`."""
    if (tripwire := tripwire_of_worker(worker)) is None:
        return WriteReport().to_dict()
    if not tripwire.is_asleep:
        worker.synchronize_device()  # a call may have written on a stream of its own
    return tripwire.look().to_dict()


def overwritten(worker: upstream.WorkerBase) -> None:
    """Record that the content of live weights is unknown, and every parameter stale."""
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.acknowledge()
    if (stager := WorkerState.of(worker).stager) is not None:
        stager.forget(served=True)
        stager.shadow.stale.update(stager.shadow.required)


def put_back(worker: upstream.WorkerBase) -> dict[str, Any]:
    """End an unfinished reload of the live model; returns the report of the tripwire.

    During the reload its parameters have no memory, so no weights could be written to
    them.
    """
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.put_back()
    return look(worker)


def make_blank(worker: upstream.WorkerBase, keeps_some: bool) -> None:
    """Blank weights whose content is lost, so that missing writes can be seen.

    Args:
        worker: of this rank.
        keeps_some: whether upstream has kept parameters over a sleep, by the
            patterns of its
            config.

    """
    if (tripwire := tripwire_of_worker(worker)) is not None:
        tripwire.make_blank(kept_over_sleep(worker) if keeps_some else ())
    if (stager := WorkerState.of(worker).stager) is not None:
        stager.shadow.stale.update(stager.shadow.required)


def kept_over_sleep(worker: upstream.WorkerBase) -> Collection[str]:
    """Patterns of the names of parameters that upstream keeps at level 2."""
    config = worker.vllm_config.model_config
    return getattr(config, "sleep_preserve_parameter_names", ()) or ()


def take_back_fill(worker: upstream.WorkerBase) -> None:
    """Blank lost weights again if an update has filled some of them in place.

    Raises:
        EngineFault: that update may still write.

    """
    let_go(worker)
    tripwire = tripwire_of_worker(worker)
    if tripwire is not None and tripwire.is_filling:
        make_blank(worker, False)


def let_go(worker: upstream.WorkerBase) -> None:
    """See `StagingWorker.let_go`."""
    if (stager := WorkerState.of(worker).stager) is not None:
        stager.let_go()


def tripwire_of_worker(worker: upstream.WorkerBase) -> WriteWatch | None:
    """The tripwire of a worker.

    None if its models were not loaded by upstream's loader.
    """
    return WorkerState.of(worker).tripwire


MOVES: dict[str, Callable[..., Any]] = {
    "attach": attach,
    "adopt_loads": adopt_loads,
    "announce_loads": announce_loads,
    "methods": methods,
    "missing_load_steps": missing_load_steps,
    "arm": arm,
    "look": look,
    "overwritten": overwritten,
    "put_back": put_back,
    "make_blank": make_blank,
    "let_go": let_go,
    "take_back_fill": take_back_fill,
    "acknowledge_sleep": acknowledge_sleep,
}
"""The calls that the engine core makes on a rank, by an RPC with an envelope."""
