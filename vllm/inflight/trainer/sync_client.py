"""A server, as vLLM's own trainer interface asks it: `trainer_init(…, client=…)`.

What upstream calls `VLLMWeightSyncClient`, with a key, typed errors and a label. Every
update has an id and every chunk a number, so a call whose reply was lost is made again.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from vllm.inflight.errors import (
    ConfigError,
    InflightError,
    UnknownUpdate,
    WrongPhase,
)
from vllm.inflight.trainer.engine_clients import blamed
from vllm.inflight.trainer.http_client import HttpEngine, NotReached, Reply, control_key
from vllm.inflight.trainer.retry import RetryBudget
from vllm.inflight.update import PauseMode, check_label, check_subset

CLOSING_S = 5.0
"""Longest wait for a server when a client is closed."""


class ServerClient:
    """Brings what a trainer of vLLM's interface sends to one server.

    Attributes:
        committed: the reply of the last `finish_weight_update`: `weight_version`,
            `epoch`, `digest` (hex), `gap_ms` and more; None before the first.

    """

    committed: Reply | None = None

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadline_s: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Connect nothing yet.

        Args:
            url: of the server, or of its control port.
            api_key: of the control routes; by default `VLLM_INFLIGHT_ADMIN_KEY`,
                then `VLLM_API_KEY` of the environment.
            deadline_s: seconds that the server gives an update; its default if None.
            timeout_s: seconds to go on trying, per call.

        Raises:
            ConfigError: the URL does not begin with http:// or https://, or it or the
                key cannot be sent.

        """
        self._engine = HttpEngine(url, control_key(api_key))
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._update_id: str | None = None
        self._is_open = False
        self._num_chunks = 0
        self.announce()
        self._opened = self._opening

    def announce(
        self,
        version: str | None = None,
        *,
        step: int | None = None,
        mode: str | None = None,
        subset: Sequence[str] | None = None,
        base_version: str | None = None,
    ) -> None:
        """Say what the next update is, before `send_weights`.

        It holds until an update is committed, so one that was refused can be sent
        again; the version after that is named by the server unless this is called.
        Of a commit whose reply was lost the client learns at its next `init`, `start`
        or `shutdown`.

        Args:
            version: the label to serve it under; the server names it if None.
            step: the trainer's step number, which `/weight_info` then tells.
            mode: what happens to running requests at the commit: `in_place`,
                `retract`, `abort` or `wait`; by default the engine says.
            subset: patterns (`*`, `?`, `[…]`) of the model's names, if only these
                will be sent: the other parameters keep what is served.
            base_version: refuse unless this is the label that is served.

        Raises:
            Malformed: the label, the mode or a pattern is not what it has to be.

        """
        mode = None if mode is None else PauseMode.parse(mode).value
        manifest: Reply = {"format": 1}
        manifest |= {} if step is None else {"step": operator.index(step)}
        if patterns := check_subset(subset):
            manifest["subset"] = list(patterns)
        facts = {
            "weight_version": check_label(version),
            "base_version": base_version,
            "deadline_s": self._deadline_s,
            "manifest": manifest if len(manifest) > 1 else None,
        }
        self._mode = mode
        self._manifest = manifest
        self._opening = {name: fact for name, fact in facts.items() if fact is not None}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the server's workers join; an update of this client that failed ends.

        Args:
            init_info: of the server's backend.

        Raises:
            InflightError: what the server refused: no key, no backend, no peer.

        """
        retry_budget = self._end_what_failed()
        self._ask(self._engine.init_transport, init_info, retry_budget=retry_budget)

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the server's workers leave; an update of this client that failed ends.

        Raises:
            InflightError: what the server refused.

        """
        retry_budget = self._end_what_failed()
        self._ask(self._engine.shutdown_transport, retry_budget=retry_budget)

    @property
    def is_subset_announced(self) -> bool:
        """Whether the next update is of a subset of the parameters."""
        return "subset" in self._manifest

    def start_weight_update(self, manifest: dict[str, Any] | None = None) -> None:
        """Open an update as it was announced; one of this client that failed ends.

        Args:
            manifest: names the tensors and their digests, and the base of a delta; what
                was announced is added to it.

        Raises:
            UpdateBusy: another trainer's update is under way.
            VersionConflict: `base_version` is not what is served.
            InflightError: whatever else the server refused.

        """
        retry_budget = self._end_what_failed()
        body = self._begin({} if manifest is None else {"manifest": manifest})
        with self._nothing_open_unreached():
            self._ask(self._engine.start, body, retry_budget=retry_budget)

    def update_weights(
        self,
        update_info: dict[str, Any] | list[dict[str, Any]],
        *,
        start: dict[str, Any] | None = None,
        finish: dict[str, Any] | None = None,
    ) -> None:
        """Have a chunk received; returns when every rank has loaded it.

        With `start` the call opens the update first, with `finish` it commits it, and
        `committed` has the reply.

        Args:
            update_info: of the server's backend; of a list, each rank takes its own.
            start: what `start_weight_update` sends beside what was announced, such as
                `manifest`; None: the update is open.
            finish: what `finish_weight_update` sends beside what was announced, such as
                `weight_version`; None: the update stays open.

        Raises:
            UpdateBusy: another trainer's update is under way.
            VersionConflict: `base_version` is not what is served.
            WeightsMismatch: tensors are not the model's; `tensors` names them.
            TransferFault: the bytes stopped coming.
            ConfigError: it holds upstream's CUDA IPC handles, which are no JSON.
            InflightError: whatever else the server refused.

        """
        infos = update_info if isinstance(update_info, list) else [update_info]
        if any("ipc_handles" in info for info in infos):
            raise ConfigError(
                "upstream's backend ipc pickles its handles, which this client does "
                "not; the backend inflight_ipc lends the same memory without"
            )
        retry_budget, opens = None, {}
        if start is not None:
            retry_budget = self._end_what_failed()
            opens = {"start": self._begin(start)}
        update_id = self._update_id
        body: Reply = {"update_id": update_id, "chunk": self._num_chunks} | opens
        body |= {} if finish is None else {"finish": self._closing(finish)}
        body["update_info"] = update_info
        with self._nothing_open_unreached() if opens else nullcontext():
            reply = self._ask(self._engine.update, body, retry_budget=retry_budget)
        # A call that was given up may be answered when the next update has begun.
        if self._update_id == update_id:
            self._num_chunks += 1
            if finish is not None:
                self._committed(reply)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Verify and commit; `committed` has the reply.

        Args:
            weight_version: the label, if none was announced.

        Raises:
            WeightsMismatch: tensors are missing; `tensors` names them.
            VersionConflict: another label was announced.
            InflightError: whatever else the server refused.

        """
        label = {} if weight_version is None else {"weight_version": weight_version}
        body = {"update_id": self._update_id, **self._closing(label)}
        self._committed(self._ask(self._engine.finish, body))

    def abort_weight_update(self) -> None:
        """Give this client's last update up; what is served does not change.

        A client that has started none ends the one that is under way, so that a trainer
        which is started again can end what the one before it has left. A start that was
        refused counts: what it ran into may be another trainer's.

        Raises:
            WrongPhase: it is committed, or there is none.
            UnknownUpdate: its start was refused.
            InflightError: whatever else the server refused.

        """
        self._abort(RetryBudget(self._timeout_s))

    def get_world_size(self) -> int:
        """Count the workers that a group has beside the trainer.

        Returns:
            Their number, over all engines of the server.

        Raises:
            InflightError: what the server refused.

        """
        return int(self._ask(self._engine.world_size)["world_size"])

    def weight_info(self) -> Reply:
        """Ask what is served.

        Returns:
            The reply of `GET /weight_info`.

        Raises:
            InflightError: what the server refused.

        """
        return self._ask(self._engine.info)

    def close(self) -> None:
        """Close the connections; an open update of this client ends. Idempotent.

        A server that does not answer is not waited for: it ends the update itself, at
        its deadline.
        """
        if self._is_open:
            self._is_open = False
            with suppress(InflightError):
                self._engine.abort(self._update_id, RetryBudget(CLOSING_S))
        self._engine.close()

    def __enter__(self) -> ServerClient:
        """The client, closed at the end of the `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it, and end what is open."""
        self.close()

    def _begin(self, start: Reply) -> Reply:
        """Begin another update; the fields of its start."""
        self._update_id, self._num_chunks = uuid.uuid4().hex, 0
        self._is_open, self._opened = True, self._opening
        body = {"update_id": self._update_id} | start | self._opening
        if (manifest := start.get("manifest")) is not None:
            body["manifest"] = manifest | self._manifest
        return body

    def _closing(self, finish: Reply) -> Reply:
        """The fields of the end of an update."""
        return ({} if self._mode is None else {"mode": self._mode}) | finish

    @contextmanager
    def _nothing_open_unreached(self) -> Iterator[None]:
        """Note that nothing has begun, if the server could not be reached."""
        try:
            yield
        except NotReached:
            self._is_open = False  # so nothing is to be ended
            raise

    def _abort(self, retry_budget: RetryBudget) -> None:
        self._ask(self._engine.abort, self._update_id, retry_budget=retry_budget)
        self._is_open = False

    def _end_what_failed(self) -> RetryBudget:
        """An update whose trainer gave up would keep the next one out as busy.

        Returns the retry_budget of the whole call, of which this is the beginning.
        """
        retry_budget = RetryBudget(self._timeout_s, is_logged=True)
        if self._is_open:
            with suppress(UnknownUpdate):
                try:
                    self._abort(retry_budget)
                except WrongPhase:  # it was committed, and the reply was lost
                    report = self._ask(
                        self._engine.status, self._update_id, retry_budget=retry_budget
                    )
                    self._committed(report["result"])
            self._is_open = False
        return retry_budget

    def _committed(self, reply: Reply) -> None:
        self.committed = reply
        self._is_open = False
        if self._opening is self._opened:  # else another was announced meanwhile
            self.announce()

    def _ask(
        self,
        call: Callable[..., Reply],
        *arguments: object,
        retry_budget: RetryBudget | None = None,
    ) -> Reply:
        try:
            budget = retry_budget or RetryBudget(self._timeout_s, is_logged=True)
            return call(*arguments, budget)
        except InflightError as error:
            blamed(error, self._engine)
            raise
