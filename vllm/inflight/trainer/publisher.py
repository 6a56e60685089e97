"""The publisher: a trainer's door to its engines.

`publish` copies the weights before it returns, so the optimiser may go on at
once; everything after that happens in a thread of the publisher. One publish is
under way at a time and at most one more waits, so there are never more than two
snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, overload

import torch

from vllm.inflight.delta.compression import check_level
from vllm.inflight.delta.encode import compressed
from vllm.inflight.delta.part import Part
from vllm.inflight.delta.parts import named, parts_of
from vllm.inflight.errors import (
    BaseMismatch,
    Cancelled,
    ConfigError,
    DeltaUnsupported,
    EngineUnreachable,
    InflightError,
    TooManyUpdates,
    UpdateBusy,
)
from vllm.inflight.tensor_names import matcher
from vllm.inflight.trainer.control.engines import Controls
from vllm.inflight.trainer.control.pause import Calls, Pause
from vllm.inflight.trainer.coordinator import Coordinator, Progress, call_all
from vllm.inflight.trainer.deltas.chain import KEPT_DELTAS, DeltaChain
from vllm.inflight.trainer.deltas.delta import (
    MOST_UNSUPPORTED,
    OF_A_DELTA,
    POLICIES,
    Delta,
    DeltaSearch,
)
from vllm.inflight.trainer.deltas.kept_file import KeptFile
from vllm.inflight.trainer.deltas.policy import MEMORIES
from vllm.inflight.trainer.deltas.published import (
    SCRUB_EVERY,
    KeptScrubs,
    PublishedVersion,
)
from vllm.inflight.trainer.deltas.shard_publishes import ShardPublishes
from vllm.inflight.trainer.engine_clients import Engine, InProcessEngine, connect
from vllm.inflight.trainer.http_client import Reply
from vllm.inflight.trainer.name_matching import AUTO, NameMatching
from vllm.inflight.trainer.outcome import Outcome, note_unheard
from vllm.inflight.trainer.publish_queue import ON_BUSY, PublishQueue, QueuedPublish
from vllm.inflight.trainer.retry import FIRST_DELAY_S, LAST_DELAY_S, RetryBudget
from vllm.inflight.trainer.served_dtype import ServedDtype
from vllm.inflight.trainer.snapshot import Snapshot, sweep
from vllm.inflight.trainer.sources import stream as sources
from vllm.inflight.trainer.sources.cast import Cast, check_cast
from vllm.inflight.update import Manifest, PauseMode, check_label, check_subset, renamer

WIRES = ("shm", "disk", "http")
SHORT_S = 1.0
"""A server that does not answer in less than this may be well, and busy."""

logger = logging.getLogger(__name__)

BLOCKS = "would block the event loop that the engine answers on; use "


class Publisher:
    """Publishes the weights of one source to one or more engines."""

    def __init__(
        self,
        engines: object,
        source: sources.Source,
        *,
        name_map: (
            Mapping[str, str] | Callable[[str], str] | Literal["auto"] | None
        ) = None,
        dtype: Cast = None,
        api_key: str | None = None,
        wire: str = "shm",
        directory: str | Path | None = None,
        digests: bool = True,
        delta: str = "auto",
        delta_file: str | Path | None = None,
        delta_memory: str = "host",
        delta_compression: int | None = None,
        delta_scrub_every: int = SCRUB_EVERY,
        delta_chain: int = KEPT_DELTAS,
        delta_shards: bool = False,
        min_interval_s: float = 0.0,
        on_busy: str = "wait",
        deadline_s: float | None = None,
        timeout_s: float = 600.0,
        progress: Progress | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Connect nothing yet; the engines need backend `local` for transfers.

        Args:
            engines: URLs of servers, or an `LLM`, or an `AsyncLLM`; one or a list.
            source: a module, a state dict, an iterable of (name, tensor), or a
                callable that returns one of these; read anew at every publish.
            name_map: from the names of the source to those of the model: a dict, or
                a function of a name; or `auto`: every name that the model does not
                have stands for the only one with the same ending and shape, and
                `Outcome.mapped` tells which. If one of them stands for several or
                for none, nothing is sent.
            dtype: what floating-point tensors are cast to before they are compared and
                sent; or a function from a name of the source to such a dtype, or None.
                A trainer with weights in float32 gives the dtype of the checkpoint, so
                that few elements change at a step. If None, deltas are sent, and the
                engines serve all tensors in one narrower dtype and as they are sent,
                they are cast to that from the second version on.
            api_key: of the control routes; by default `VLLM_INFLIGHT_ADMIN_KEY`,
                then `VLLM_API_KEY` of the environment.
            wire: `shm` hands tensors over in shared memory, on one host; `disk`
                in a file of `directory`, which the engines see at the same path;
                `http` in the bodies of requests, to servers on any host.
            directory: of wire `disk`, and of that only.
            digests: whether the engines shall check the content of every tensor.
            delta: whether to send only the elements that have changed since the last
                commit: `auto` where that is less to send, `always`, or `off`. For
                that, the last version stays in shared memory, or in `directory`. An
                engine that serves an unknown version gets the whole one. Needs
                `digests`.
            delta_file: keeps the last version in this file, and not in memory. After a
                restart of the trainer, the first publish reads it, and may be a delta.
            delta_memory: where the last version is kept: `host`, in shared memory or in
                `directory`, where changes are found, too; or `device`, where the
                tensors of the source are, usually a GPU. That takes one more copy of
                the weights there, and up to a quarter of one for the last deltas.
            delta_compression: level of zstd that deltas are compressed with, 1 to 22; 3
                is a good one. It pays where bytes are slow: over the network, or on
                disks. None: no compression.
            delta_scrub_every: after so many deltas, the kept version is read again and
                compared with its digests, which takes as long as a snapshot. If it has
                changed, the next version is sent whole. 0: never.
            delta_chain: how many committed deltas are kept in memory, at most a quarter
                of the version's bytes. An engine that has missed some of them, or was
                rolled back, gets what they have changed and not the whole version.
            delta_shards: whether each rank of the trainer looks for changes in its own
                shards, so that only changes are gathered. All ranks of torch's default
                group have such a publisher, and all call `publish`. Rank 0 sends; the
                `engines` of other ranks are not used.
            min_interval_s: least seconds from one commit to the next update.
            on_busy: while another update is under way, here or in an engine:
                `wait` for it, `skip` this publish, or be replaced by the `latest`.
            deadline_s: seconds that the engines give an update; their default
                if None.
            timeout_s: seconds to go on trying, per publish, from when its turn comes.
                To take back what an engine has stopped answering may take a quarter
                of that on top, at most 10 s.
            progress: called with a phase (`snapshot`, in the thread of `publish`;
                `transfer` and `commit`, in the publisher's), bytes done and bytes in
                all. What it raises gives the publish up; after the commit it is logged.
            loop: the event loop of an `AsyncLLM`; the running one if None.

        Raises:
            ConfigError: an argument is not what it has to be.

        """
        for value, name, choices in (
            (wire, "wire", WIRES),
            (delta, "delta", POLICIES),
            (delta_memory, "delta_memory", MEMORIES),
            (on_busy, "on_busy", ON_BUSY),
        ):
            if value not in choices:
                raise ConfigError(f"{name} must be one of {choices}, got {value!r}")
        if delta == "always" and not digests:
            raise ConfigError("delta='always' needs digests=True")
        if delta_memory == "device" and (delta_shards or delta_file is not None):
            raise ConfigError(
                "delta_memory='device' excludes delta_file, and delta_shards: with "
                "these the last version is in a file, or in host memory of each rank"
            )
        if (wire == "disk") == (directory is None):
            raise ConfigError("directory= belongs to wire='disk', and that needs it")
        sources.check_source(source)
        check_cast(dtype)
        check_level(delta_compression)
        self._compression = delta_compression
        self._source, self._cast = source, dtype
        self._directory = None if directory is None else Path(directory)
        self._in_bodies = wire == "http"
        self._digests = digests
        self._delta = delta if digests else "off"
        self._is_kept_on_device = delta_memory == "device"
        self._kept_file: KeptFile | None = None
        if delta_file is not None and self._delta != "off":
            self._kept_file = KeptFile(Path(delta_file))
        self._has_begun = False
        """Whether the first publish has looked into the file."""
        self._scrubs = KeptScrubs(delta_scrub_every)
        self._chain = DeltaChain(delta_chain)
        self._num_unsupported = 0
        self._base: PublishedVersion | None = None
        """The last version that every engine has committed, if a delta may start from
        it. A publish takes it, and puts it back."""
        self._min_interval_s = min_interval_s
        self._on_busy = on_busy
        self._deadline_s = deadline_s
        self._progress = progress
        plain_map = None if isinstance(name_map, str) else name_map
        self._shards: ShardPublishes | None = None
        if delta_shards:
            if name_map == AUTO:
                raise ConfigError("name_map='auto' and delta_shards exclude each other")
            if delta_file is not None:
                raise ConfigError(
                    "delta_file and delta_shards exclude each other: each rank keeps "
                    "its own shards, in memory"
                )
            self._shards = ShardPublishes(
                source,
                renamer(plain_map),
                dtype,
                self._delta,
                delta_scrub_every,
                delta_chain,
            )
        self._engines: list[Engine] = []
        if self._shards is None or self._shards.is_first:
            self._engines = connect(engines, api_key=api_key, loop=loop)
        if self._in_bodies and any(
            isinstance(e, InProcessEngine) for e in self._engines
        ):
            raise ConfigError("wire='http' is for servers, given by their URLs")
        self._served_dtype = ServedDtype(self._engines)
        self._naming: NameMatching | None = None
        if isinstance(name_map, str):
            if name_map != AUTO:
                raise ConfigError(
                    f"name_map must be a dict, a function or {AUTO!r}, got {name_map!r}"
                )
            self._naming = NameMatching(self._engines)
        self._rename = self._naming or renamer(plain_map)
        self._queue = PublishQueue(on_busy, timeout_s, self._deliver)
        self._calls = threading.Lock()
        self._unread: list[QueuedPublish] = []
        """With `block=False`: under way, or failed and not read."""
        self._controls = Controls(self._engines, call_all)
        self._timeout_s = timeout_s
        self._committed = float("-inf")
        for one in {None, self._directory}:
            sweep(directory=one)

    @overload
    def publish(
        self,
        version: str | None = None,
        *,
        mode: str | None = None,
        step: int | None = None,
        subset: Sequence[str] | None = None,
        base_version: str | None = None,
        block: Literal[True] = True,
    ) -> Outcome: ...

    @overload
    def publish(
        self,
        version: str | None = None,
        *,
        mode: str | None = None,
        step: int | None = None,
        subset: Sequence[str] | None = None,
        base_version: str | None = None,
        block: Literal[False],
    ) -> Future[Outcome]: ...

    def publish(
        self,
        version: str | None = None,
        *,
        mode: str | None = None,
        step: int | None = None,
        subset: Sequence[str] | None = None,
        base_version: str | None = None,
        block: bool = True,
    ) -> Outcome | Future[Outcome]:
        """Take a snapshot of the weights and have every engine serve it.

        The snapshot is complete when this returns, also with `block=False`.

        Args:
            version: the label to serve it under; the engine names it if None.
            mode: what happens to running requests at the commit: `in_place`,
                `retract`, `abort` or `wait`; by default the engine says.
            step: the trainer's step number, which `/weight_info` then tells.
            subset: patterns (`*`, `?`, `[…]`) of the model's names, if only these
                have changed: the other parameters keep what is served.
            base_version: refuse unless this is the label that is served; keeps a
                subset off an engine that has been started anew.
            block: whether to wait for the commit. Without, this returns as soon as the
                snapshot is taken.

        Returns:
            The `Outcome`, or with `block=False` a `concurrent.futures.Future` of it.

        Raises:
            ConfigError: a subset, and a publish may give way: what it brings would
                be missing from every later one. Or a subset, and `name_map="auto"`
                has not found out the names yet. Or `delta_shards`, and `block=False`,
                or the ranks have no shards that could be compared.
            InflightError: what an engine refused. No engine serves the version then.
                With `block=False` the future raises it, and a line is logged. If
                nobody reads the future, the next `publish` or `close` raises it; that
                publish sends nothing.
            OSError: there is no room for a snapshot.
            RuntimeError: the publisher is closed, or this is called on the event loop
                of an `AsyncLLM` and would block it; await `apublish` there.

        """
        if self._shards is not None:
            if not block:
                raise ConfigError(
                    "with delta_shards, publish waits for the commit on all ranks of "
                    "the trainer; leave block=False out"
                )
            return self._publish_by_all(
                self._shards, version, mode, step, subset, base_version
            )
        may_wait = not self._is_on_the_loop()
        if block:
            self._require_off_the_loop()
        job = self._taken(
            version, mode, step, subset, base_version, may_wait=may_wait, block=block
        )
        return self._queue.result(job) if block else job.future

    async def apublish(
        self,
        version: str | None = None,
        *,
        mode: str | None = None,
        step: int | None = None,
        subset: Sequence[str] | None = None,
        base_version: str | None = None,
    ) -> Outcome:
        """Publish, and let the event loop go on; for the loop of an `AsyncLLM` too.

        The snapshot is taken in another thread. Change the weights only after this
        has returned. If the task is cancelled, the publish is given up, unless it is
        committed.

        Args:
            version: the label to serve it under; the engine names it if None.
            mode: what happens to running requests at the commit: `in_place`,
                `retract`, `abort` or `wait`; by default the engine says.
            step: the trainer's step number, which `/weight_info` then tells.
            subset: patterns of the model's names, if only these have changed.
            base_version: refuse unless this is the label that is served.

        Returns:
            The `Outcome`.

        Raises:
            ConfigError: as `publish` raises it; or the publisher has `delta_shards`.
            InflightError: what an engine refused. No engine serves the version then.
            OSError: there is no room for a snapshot.
            RuntimeError: the publisher is closed.

        """
        if self._shards is not None:
            raise ConfigError(
                "apublish cannot gather with other ranks: with delta_shards, await "
                "asyncio.to_thread(publisher.publish, ...) on every rank"
            )
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def take() -> QueuedPublish:
            if device is not None:
                torch.cuda.set_device(device)  # it is another one in a new thread
            facts = version, mode, step, subset, base_version
            return self._taken(*facts, may_wait=True, block=True)

        why = "the task that called apublish was cancelled"

        taken: list[QueuedPublish] = []

        def give_up(_: BaseException | None) -> None:
            for job in taken:
                self._queue.give_one_up(job, why)

        await Calls().run(lambda: taken.append(take()), undo=give_up)
        (job,) = taken
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._queue.give_one_up(job, why)
            raise

    def _taken(
        self,
        version: str | None,
        mode: str | None,
        step: int | None,
        subset: Sequence[str] | None,
        base_version: str | None,
        *,
        may_wait: bool,
        block: bool,
    ) -> QueuedPublish:
        """A publish whose snapshot is taken and which is in the queue."""
        job = self._job(version, mode, step, subset, base_version)
        with self._turn(may_wait):
            self._raise_unread()
            has_place = self._queue.make_room(may_wait=may_wait)
            if has_place:
                self._enqueue(job)
            else:
                sources.take_part(self._source)
                job.future.set_result(job.skipped())
            if not block:
                job.future.note_failure(job.version)
                self._unread.append(job)
        return job

    def _job(
        self,
        version: str | None,
        mode: str | None,
        step: int | None,
        subset: Sequence[str] | None,
        base_version: str | None,
    ) -> QueuedPublish:
        """A publish with these arguments, which are checked."""
        mode = None if mode is None else PauseMode.parse(mode).value
        version = check_label(version)
        step = None if step is None else operator.index(step)
        patterns = check_subset(subset)
        if patterns and self._on_busy != "wait":
            raise ConfigError("subset= needs a publisher with on_busy='wait'")
        if patterns and self._naming is not None and not self._naming.is_known:
            raise ConfigError(
                "subset= has the names of the model, and name_map='auto' knows them "
                "only when a whole version has been published"
            )
        return QueuedPublish(
            version, mode, step, patterns, base_version, time.monotonic()
        )

    def _publish_by_all(
        self,
        shards: ShardPublishes,
        version: str | None,
        mode: str | None,
        step: int | None,
        subset: Sequence[str] | None,
        base_version: str | None,
    ) -> Outcome:
        """Publish with the other ranks of the trainer. Collective."""
        made = partial(self._job, version, mode, step, subset, base_version)
        first = made()  # what is wrong with the arguments is raised on every rank

        def send(manifest: Manifest, pairs: Iterable[sources.Pair]) -> Outcome:
            self._require_off_the_loop()
            job = replace(made(), called_at=first.called_at)
            job.manifest, job.is_announced = replace(manifest, step=job.step), True
            if manifest.base is None:
                job.snapshot = Snapshot.pack(pairs, self._directory)
            else:
                job.snapshot = self._packed(parts_of(pairs))
            self._put(job)
            return self._queue.result(job)

        def send_plain() -> Outcome:
            self._require_off_the_loop()
            self._enqueue(first)
            return self._queue.result(first)

        with self._turn(may_wait=True):
            return shards.publish(
                is_subset=bool(first.subset), send=send, send_plain=send_plain
            )

    def _raise_unread(self) -> None:
        """Raise the error of an earlier publish whose future nobody has read."""
        unread = self._failures()
        if not unread:
            return
        sources.take_part(self._source)  # else the trainer's other ranks wait for it
        raise _of_unread(unread, "nothing of this publish was sent")

    def _failures(self) -> list[QueuedPublish]:
        """Publishes that failed and whose futures nobody has read, once each."""
        left = [job for job in self._unread if not job.future.is_read]
        self._unread = [job for job in left if not job.future.done()]
        errors = [(job, job.future.unread_error) for job in left]
        # What was given up, was given up by the user of this publisher.
        return [
            job
            for job, error in errors
            if error is not None and not isinstance(error, Cancelled)
        ]

    def close(self) -> None:
        """Finish what was published, then let the engines go. Idempotent.

        While it waits it logs what for, if an engine is busy or does not answer.

        Raises:
            InflightError: the error of a publish with `block=False` whose future
                nobody has read; it is raised once, after everything is closed.

        """
        if not self._queue.is_idle and self._is_on_the_loop():
            raise RuntimeError(f"close() {BLOCKS}await asyncio.to_thread(...)")
        self._queue.close()
        self._let_go()
        if unread := self._failures():
            raise _of_unread(unread, "the publisher is closed")

    def __enter__(self) -> Publisher:
        """The publisher, closed at the end of the `with`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it; after an exception, give up at once what is not committed."""
        if kind is None:
            self.close()
            return
        # On its own loop an `AsyncLLM` could not answer while this waits.
        may_wait = not self._is_on_the_loop()
        why = f"{kind.__name__} was raised in the with block of the publisher"
        self._queue.give_up(why, wait=may_wait)
        if may_wait:
            self._let_go()

    def status(self, update_id: str | None = None) -> dict[str, Reply]:
        """`ControlClient.status` of every engine.

        Returns:
            Name of the engine → its reply; likewise for the methods below.

        """
        return self._controls.status(update_id, self._budget("status"))

    def weight_info(self) -> dict[str, Reply]:
        """`ControlClient.weight_info` of every engine."""
        return self._controls.weight_info(self._budget("weight_info"))

    def rollback(
        self, to_version: str | None = None, mode: str | None = None
    ) -> dict[str, Reply]:
        """Roll every engine back, or none: see `ControlClient.rollback`.

        Raises:
            VersionConflict: the engines have different rollback targets.

        """
        return self._controls.rollback(to_version, mode, self._budget("rollback"))

    def pause(
        self,
        mode: str = "in_place",
        *,
        lease_s: float | None = None,
        owner: str | None = None,
        flush_cache: bool = False,
    ) -> Pause:
        """Pause every engine, or none: see `ControlClient.pause`.

        Returns:
            A `Pause` for a `with` block; its `replies` has the reply of each engine.

        """
        budget = self._budget("pause")
        pause = self._controls.pause(
            self._timeout_s,
            mode=mode,
            lease_s=lease_s,
            owner=owner,
            flush_cache=flush_cache,
        )
        pause._begin(budget)
        return pause

    def continue_(self, owner: str | None = None) -> dict[str, Reply]:
        """Continue every engine, then raise if one rejected it."""
        return self._controls.continue_(owner, self._budget("continue_"))

    def is_paused(self) -> bool:
        """Whether decoding is paused on one engine at least."""
        return self._controls.is_paused(self._budget("is_paused"))

    def abort(self, update_id: str | None = None) -> dict[str, Reply]:
        """Abort an update on every engine that has it.

        Returns:
            Replies of those engines.

        """
        return self._controls.abort(update_id, self._budget("abort"))

    def wait_for(
        self, version: str, timeout_s: float | None = None
    ) -> dict[str, Reply]:
        """Wait until every engine serves a version: see `ControlClient.wait_for`."""
        return self._controls.wait_for(version, self._budget("wait_for", timeout_s))

    def _budget(self, method: str, timeout_s: float | None = None) -> RetryBudget:
        if self._is_on_the_loop():
            raise RuntimeError(
                f"{method}() {BLOCKS}the engine's own methods, or await "
                "asyncio.to_thread(...)"
            )
        seconds = self._timeout_s if timeout_s is None else timeout_s
        return RetryBudget(seconds, is_logged=True)

    def _let_go(self) -> None:
        self._base = None
        self._chain.clear()
        if self._kept_file is not None:
            self._kept_file.close()
        for engine in self._engines:
            engine.close()

    @contextmanager
    def _turn(self, may_wait: bool) -> Iterator[None]:
        """One snapshot at a time."""
        if not self._calls.acquire(blocking=may_wait):
            raise RuntimeError(
                "another thread is in publish(), and to wait for it would block the "
                "engine's event loop"
            )
        try:
            yield
        finally:
            self._calls.release()

    def _enqueue(self, job: QueuedPublish) -> None:
        """Take the snapshot, and have it delivered."""
        is_declared = matcher(job.subset)
        cast = self._served_dtype.cast if self._cast is None else self._cast
        with sources.gathering(sources.tensors(self._source, cast)) as pairs:
            known = ((n, self._rename(n), t) for n, t in pairs)
            # With `auto` the names are found out later, in the queue's thread.
            base = self._take_base(job)
            is_early = self._naming is not None and base is None
            sent = (
                (name if is_early else renamed, tensor)
                for name, renamed, tensor in known
                if not job.subset or is_declared(renamed)
            )
            self._take_snapshot(job, base, job.noting_device(sent))
        self._put(job)

    def _put(self, job: QueuedPublish) -> None:
        """Have a publish delivered, whose snapshot is taken."""
        parcel = job.snapshot
        job.snapshot_s = time.monotonic() - job.called_at
        try:
            self._tell("snapshot", parcel)
            self._queue.put(job)
        except BaseException:
            parcel.remove()  # whoever keeps the error would keep it
            raise

    def _take_base(self, job: QueuedPublish) -> PublishedVersion | None:
        """The version that a delta of this publish starts from; None: it is whole.

        While another publish is under way, its version is not known to be served.
        """
        base, self._base = self._base, None
        has_begun, self._has_begun = self._has_begun, True
        if job.subset or not self._queue.is_idle:
            return None
        # With `auto`, the names are not found out yet.
        if has_begun or self._kept_file is None or self._naming is not None:
            return base
        return self._kept_file.read()

    def _take_snapshot(
        self,
        job: QueuedPublish,
        base: PublishedVersion | None,
        sent: Iterable[sources.Pair],
    ) -> None:
        """Copy the tensors, or what has changed of them, into a file."""
        if base is None:
            job.snapshot = Snapshot.pack(sent, self._directory)
            return
        found = DeltaSearch(base, self._delta).run(sent, self._directory)
        if isinstance(found, Snapshot):
            job.snapshot = found
            job.is_named = True
        else:
            job.delta = found
            job.snapshot = self._packed(found.body.parts)

    def _packed(self, parts: Iterable[Part]) -> Snapshot:
        """A snapshot of a delta, compressed if that is wanted."""
        level = self._compression
        if level is not None:
            parts = (compressed(part, level) for part in parts)
        return Snapshot.pack(named(parts), self._directory)

    def _deliver(self, job: QueuedPublish) -> Outcome:
        """One publish, in the queue's thread."""
        try:
            with _current(job.device):
                return self._delivered(job)
        finally:
            if job.delta is not None and not job.delta.is_applied:
                self._base = job.delta.base  # it may still be what is served

    def _delivered(self, job: QueuedPublish) -> Outcome:
        pace_s = self._committed + self._min_interval_s - time.monotonic()
        if pace_s > 0 and self._queue.give_way(pace_s):
            return job.skipped()
        job.retry_budget.begin()
        began = time.monotonic()
        try:
            return self._served(job, began)
        except OF_A_DELTA as error:
            if (delta := job.delta) is None:
                raise
            refused = error
        if isinstance(refused, BaseMismatch) and self._go_longer(job, delta, refused):
            try:
                return self._served(job, began)
            except OF_A_DELTA as error:
                refused = error
        self._go_whole(job, delta, refused)
        return self._served(job, began)

    def _served(self, job: QueuedPublish, began: float) -> Outcome:
        """Have the engines stage and commit what a job holds."""
        delivery = self._stage(job)
        if delivery is None:
            return job.skipped()
        base: PublishedVersion | None = None
        try:
            self._ask_dtype(job)  # they answer while they commit
            if self._may_follow(job):
                try:
                    base = self._kept(job)
                # Not every file system can map a file, and a GPU may be full.
                except (OSError, torch.OutOfMemoryError) as error:
                    logger.warning("the next version is sent whole: %s", error)
            job.snapshot.remove()
        except BaseException:
            delivery.undo()  # else the update would stay open on the engines
            raise
        staged = time.monotonic()
        replies = delivery.commit(mode=job.mode)
        self._committed = time.monotonic()
        if job.delta is not None:
            self._num_unsupported = 0
            try:
                base = job.delta.commit()
            except Exception:  # the engines serve the version, whatever is kept here
                logger.exception("the next version is sent whole")
        # Where an engine digests other tensors than were sent, no delta has its base.
        if base is not None and base.digest == replies[0]["digest"]:
            is_sound = self._scrubs.is_sound(base, is_delta=job.delta is not None)
            self._base = base if is_sound else None
        if job.delta is None:
            self._chain.clear()
        elif self._base is not None:
            self._chain.note(job.delta)
        self._served_dtype.take()
        try:
            self._tell("commit", job.snapshot)
        except Exception as error:
            note_unheard(replies[0]["weight_version"], error)
        parts = {
            "snapshot": job.snapshot_s,
            "transfer": staged - began,
            "commit": self._committed - staged,
            "total": self._committed - job.called_at,
        }
        each = [one for reply in replies for one in reply.get("engines", [reply])]
        return Outcome(
            version=replies[0]["weight_version"],
            step=job.step,
            update_id=delivery.update_id,
            epochs={
                engine.name: reply["epoch"]
                for engine, reply in zip(self._engines, replies, strict=True)
            },
            digest=replies[0]["digest"],
            num_bytes=job.snapshot.num_bytes,
            is_delta=job.delta is not None or job.manifest.base is not None,
            gap_ms=max(one["gap_ms"] for one in each),
            seconds={name: round(value, 6) for name, value in parts.items()},
            mapped=job.mapped,
        )

    def _ask_dtype(self, job: QueuedPublish) -> None:
        """Ask the engines what they serve, if weights may be cast to that."""
        may_cast = self._delta != "off" or self._served_dtype.cast is not None
        if self._cast is not None or self._shards is not None or not may_cast:
            return
        dtypes = {getattr(torch, dtype) for _, _, dtype in job.snapshot.specs}
        # An engine that serves another version than expected may be another one.
        is_again = job.delta is None or bool(job.bases)
        self._served_dtype.ask(dtypes, is_again=is_again)

    def _kept(self, job: QueuedPublish) -> PublishedVersion:
        """The version of a job, in memory or in the file of `delta_file`."""
        if self._kept_file is not None:
            return self._kept_file.take(job.snapshot, job.manifest)
        version = PublishedVersion.of_file(job.snapshot, job.manifest)
        if self._is_kept_on_device and job.device is not None:
            return version.copied_to(job.device)
        return version

    def _stage(self, job: QueuedPublish) -> Coordinator | None:
        """The delivery, staged on every engine; None if it gave way."""
        retry_budget = job.retry_budget
        if job.delta is not None:
            manifest = job.manifest if job.bases else job.delta.manifest(job.step)
            return self._stage_as(job, manifest)
        if job.is_announced:
            return self._stage_as(job, job.manifest)
        if self._naming is not None and not job.is_named:
            job.mapped |= self._naming.find(job.snapshot.specs, retry_budget)
            job.snapshot.rename(job.mapped)
        manifest = job.snapshot.manifest(
            step=job.step, digests=self._digests, go_on=retry_budget.require
        )
        job.manifest = replace(manifest, subset=job.subset)
        return self._stage_as(job, job.manifest)

    def _go_longer(self, job: QueuedPublish, delta: Delta, error: BaseMismatch) -> bool:
        """Have a publish send what has changed since the versions that engines serve.

        False if one of these is not known, or the whole version is cheaper.
        """
        budget = job.retry_budget
        infos = call_all(self._engines, lambda engine: engine.info(budget), budget)
        digests = [info["digest"] for info in infos]
        longer = self._chain.since(digests, delta, self._delta)
        if longer is None:
            return False
        job.snapshot.remove()
        job.snapshot = self._packed(longer.body.parts)
        names = (engine.name for engine in self._engines)
        job.bases = dict(zip(names, digests, strict=True))
        job.manifest = longer.manifest(job.step)
        logger.info(
            "%d bytes of changes since an older version are sent: %s",
            job.snapshot.num_bytes,
            error,
        )
        return True

    def _go_whole(self, job: QueuedPublish, delta: Delta, error: InflightError) -> None:
        """Have a publish send the whole version, after an engine rejected its delta."""
        level = logging.INFO if isinstance(error, BaseMismatch) else logging.WARNING
        logger.log(level, "the whole version is sent in place of a delta: %s", error)
        self._num_unsupported += isinstance(error, DeltaUnsupported)
        if self._num_unsupported >= MOST_UNSUPPORTED:
            self._delta = "off"
            logger.warning("whole versions are sent from now on")
        job.snapshot.remove()
        job.snapshot = Snapshot.pack(delta.whole(), self._directory)
        delta.base.free()  # else it would be there beside the one that is kept next
        job.delta, job.bases, job.is_named = None, {}, True

    def _may_follow(self, job: QueuedPublish) -> bool:
        """Whether a delta may follow this publish: it has all tensors, digested."""
        if self._delta == "off" or self._shards is not None:
            return False
        return job.delta is None and not job.subset

    def _stage_as(self, job: QueuedPublish, manifest: Manifest) -> Coordinator | None:
        """The delivery, staged under this manifest; None if it gave way."""
        retry_budget = job.retry_budget
        delay = FIRST_DELAY_S
        refused: UpdateBusy | TooManyUpdates | None = None
        while True:
            # Each try under an id of its own: the one before was aborted.
            delivery = Coordinator(self._engines, retry_budget.shared(), self._progress)
            left_s = retry_budget.left()
            try:
                delivery.stage(
                    job.snapshot,
                    manifest,
                    version=job.version,
                    base_version=job.base_version,
                    bases=job.bases,
                    deadline_s=self._deadline_s,
                    in_bodies=self._in_bodies,
                )
                return delivery
            except EngineUnreachable as error:
                # The last try had hardly any time to be answered.
                if refused is None or delivery.is_begun or left_s > SHORT_S:
                    raise
                raise refused from error
            except (UpdateBusy, TooManyUpdates) as error:
                refused = error
                is_busy = isinstance(error, UpdateBusy)
                if self._on_busy == "skip" and is_busy:
                    return None
                retry_budget.note(error.message)
                wait_s, left = max(delay, error.retry_after_s or 0), retry_budget.left()
                is_last = left <= (FIRST_DELAY_S if is_busy else wait_s)
                if wait_s >= left and is_busy:
                    # It is asked more often towards the end, and not after it.
                    wait_s = left if is_last else left / 2
                elif is_last:
                    raise  # by a rate, every try that is refused counts
                if self._queue.give_way(wait_s):
                    return None
                retry_budget.require()
                if is_last:
                    raise
            delay = min(2 * delay, LAST_DELAY_S)

    def _tell(self, phase: str, parcel: Snapshot) -> None:
        if self._progress is not None:
            self._progress(phase, parcel.num_bytes, parcel.num_bytes)

    def _require_off_the_loop(self) -> None:
        if self._is_on_the_loop():
            raise RuntimeError(
                f"publish(block=True) {BLOCKS}block=False, await apublish(...), or "
                "await asyncio.to_thread(...)"
            )

    def _is_on_the_loop(self) -> bool:
        """Whether this thread runs the loop of an `AsyncLLM`, which waits for it."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return False
        return any(
            isinstance(e, InProcessEngine) and e.loop is running for e in self._engines
        )


def _current(device: torch.device | None) -> AbstractContextManager[None]:
    """A context in which a GPU is the current one: kernels are launched there."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device)


def _of_unread(unread: Sequence[QueuedPublish], consequence: str) -> BaseException:
    """The error of the first of these publishes, with notes on all of them."""
    first, *others = [job.future.unread_error for job in unread]
    assert first is not None
    for job, error in zip(unread, [first, *others], strict=True):
        # Whoever has the future after all is told there.
        job.future.is_read = True
        also = "" if error is first else f"; its error: {error}"
        first.add_note(
            f"the publish of {job.version!r} failed earlier, and nobody has "
            f"read its future (block=False){also}"
        )
    first.add_note(consequence)
    return first
