"""The control routes of one server as methods, blocking or awaitable.

Errors are the classes of `vllm.inflight.errors`. A call whose reply was lost is made
again if that is safe, for `timeout_s` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from vllm.inflight.trainer.control.engines import Controls, Replies
from vllm.inflight.trainer.control.pause import AsyncPause, Calls, Pause
from vllm.inflight.trainer.http_client import HttpEngine, Reply, control_key
from vllm.inflight.trainer.retry import RetryBudget
from vllm.inflight.update import PauseMode, check_label, check_subset

T = TypeVar("T")


class ControlClient:
    """Asks the control routes of one server; close it, or use it in a `with` block."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        """Connect nothing yet.

        Args:
            url: of the server, or of its control port.
            api_key: of the control routes; by default `VLLM_INFLIGHT_ADMIN_KEY`,
                then `VLLM_API_KEY` of the environment.
            timeout_s: seconds to go on trying, per call.

        Raises:
            ConfigError: the URL does not begin with http:// or https://, or it or the
                key cannot be sent.

        """
        self._engine = HttpEngine(url, control_key(api_key))
        self._controls = Controls([self._engine])
        self._timeout_s = timeout_s

    def status(self, update_id: str | None = None) -> Reply:
        """Ask where an update stands, or for all that are remembered.

        Args:
            update_id: of the update; all if None.

        Returns:
            The reply of `GET /weight_update/{update_id}`; of all updates `active`,
            `rollback` and `outcomes`, the newest first.

        Raises:
            UnknownUpdate: no update with that id is remembered.

        """
        return _only(self._controls.status(update_id, self._budget()))

    def weight_info(self) -> Reply:
        """Ask what is live, and for the rollback target.

        Returns:
            `weight_version`, `epoch`, `digest`, `step`, `previous` and more of
            `GET /weight_info`.

        """
        return _only(self._controls.weight_info(self._budget()))

    def update_weights_from_disk(
        self,
        path: str,
        weight_version: str | None = None,
        *,
        mode: str | None = None,
        subset: Sequence[str] | None = None,
        base_version: str | None = None,
        expect_digest: str | None = None,
        deadline_s: float | None = None,
    ) -> Reply:
        """Publish a checkpoint that the server's host can read.

        Args:
            path: of a safetensors file, or of a directory of them, on the server's
                host.
            weight_version: the label; the server names the version if None.
            mode: what happens to running requests at the commit: `in_place`,
                `retract`, `abort` or `wait`; by default the server says.
            subset: patterns of the model's names, if the checkpoint does not have all.
            base_version: reject the update unless this is the live label.
            expect_digest: reject the update unless the new version has this digest.
            deadline_s: seconds that the server gives the update; its default if None.

        Returns:
            `weight_version`, `epoch`, `digest`, `gap_ms` and more of
            `POST /update_weights_from_disk`.

        Raises:
            Malformed: the path does not exist, or an argument is invalid.
            Forbidden: the path is outside of `--inflight-allowed-paths`.
            WeightsMismatch: it is not a whole checkpoint of this model.
            UpdateBusy: another update is under way.

        """
        facts = {
            "path": str(path),
            "weight_version": check_label(weight_version),
            "mode": None if mode is None else PauseMode.parse(mode).value,
            "subset": None if subset is None else list(check_subset(subset)),
            "base_version": base_version,
            "expect_digest": expect_digest,
            "deadline_s": deadline_s,
        }
        body = {name: fact for name, fact in facts.items() if fact is not None}
        return _only(self._controls.update_from_disk(body, self._budget()))

    def rollback(self, to_version: str | None = None, mode: str | None = None) -> Reply:
        """Serve the rollback target, the version before, again.

        Args:
            to_version: reject the rollback unless this is the rollback target's label.
            mode: what happens to running requests; `in_place` if None.

        Returns:
            `weight_version`, `epoch`, `digest`, `step` and `committed_at` of what is
            live now. `gap_ms` and more of `POST /rollback_weights` are missing if the
            reply was lost.

        Raises:
            NothingToRollBack: the version before is not held any more.
            VersionConflict: `to_version` is not the rollback target.
            UpdateBusy: an update is under way.

        """
        return _only(self._controls.rollback(to_version, mode, self._budget()))

    def pause(
        self,
        mode: str = "in_place",
        *,
        lease_s: float | None = None,
        owner: str | None = None,
        flush_cache: bool = False,
    ) -> Pause:
        """Pause decoding; in a `with` block, renew the pause and continue at its end.

        Args:
            mode: what happens to running requests: `in_place`, `retract`, `abort` or
                `wait`. The call returns when the mode has taken effect.
            lease_s: seconds after which decoding goes on by itself unless the pause is
                renewed, which a `with` block does; 0 for never. None: 60 in a `with`
                block, else `--inflight-pause-lease-s` of the server.
            owner: whose pause it is; another owner can neither change nor end it.
            flush_cache: whether to drop the caches.

        Returns:
            A `Pause`, whose `reply` is that of `POST /pause_generation`.

        Raises:
            PauseConflict: the pause that is in force forbids this mode.
            OwnedByAnother: the pause in force is another owner's.
            PauseLost: at the end of a `with` block: decoding went on before, or the
                pause became another owner's. If the block raises, its error counts,
                and a note and a log line tell of the lost pause.

        """
        pause = self._controls.pause(
            self._timeout_s,
            mode=mode,
            lease_s=lease_s,
            owner=owner,
            flush_cache=flush_cache,
        )
        pause._begin(self._budget())
        return pause

    def continue_(self, owner: str | None = None) -> Reply:
        """Continue decoding after a pause; without a pause nothing happens.

        Args:
            owner: whose pause it is; None ends everybody's.

        Returns:
            The reply of `POST /continue_generation`.

        Raises:
            OwnedByAnother: the pause is another owner's.

        """
        return _only(self._controls.continue_(owner, self._budget()))

    def is_paused(self) -> bool:
        """Ask whether decoding is paused, in whatever mode.

        Returns:
            True or False; with data parallelism True if one engine is paused.

        """
        return self._controls.is_paused(self._budget())

    def pause_state(self) -> Reply:
        """Ask for the mode, the owner and the lease of a pause.

        Returns:
            `is_paused`, `mode`, `owner`, `lease_left_s` and more of `GET /is_paused`.

        """
        return _only(self._controls.pause_state(self._budget()))

    def abort(self, update_id: str | None = None) -> Reply:
        """Abort an update that is not committed; the live weights do not change.

        Args:
            update_id: of the update; the one under way if None, or a rollback that
                waits for running requests.

        Returns:
            `{"update_id", "phase"}`.

        Raises:
            WrongPhase: the update is committed, or none is under way.
            UnknownUpdate: no update with that id is remembered.

        """
        return _only(self._controls.abort(update_id, self._budget()))

    def wait_for(self, version: str, timeout_s: float | None = None) -> Reply:
        """Wait until a version is live.

        The server is asked about once a second, so a version that another one replaces
        sooner can be missed. A server that does not answer is asked again.

        Args:
            version: the label.
            timeout_s: seconds to wait; the client's `timeout_s` if None.

        Returns:
            The reply of `GET /weight_info`.

        Raises:
            WaitTimeout: the version is not live by then; also a `TimeoutError`.

        """
        return _only(self._controls.wait_for(version, self._budget(timeout_s)))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._engine.close()

    def __enter__(self) -> ControlClient:
        """The client, closed at the end of the `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def _budget(self, timeout_s: float | None = None) -> RetryBudget:
        seconds = self._timeout_s if timeout_s is None else timeout_s
        return RetryBudget(seconds, is_logged=True)


class _BoundClient(ControlClient):
    """The same calls on the same connections, within one budget."""

    def __init__(self, client: ControlClient, budget: RetryBudget) -> None:
        self._engine, self._controls = client._engine, client._controls
        self._timeout_s = budget.timeout_s
        self._one_budget = budget

    def _budget(self, timeout_s: float | None = None) -> RetryBudget:
        return self._one_budget


class AsyncControlClient:
    """`ControlClient` for an event loop: the same methods, awaited.

    Each call runs in a thread of its own. If its task is cancelled, the call is not
    tried again.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        """Connect nothing yet; arguments and errors are those of `ControlClient`.

        Args:
            url: of the server, or of its control port.
            api_key: of the control routes; by default `VLLM_INFLIGHT_ADMIN_KEY`,
                then `VLLM_API_KEY` of the environment.
            timeout_s: seconds to go on trying, per call.

        """
        self._client = ControlClient(url, api_key=api_key, timeout_s=timeout_s)
        self._calls = Calls()

    async def status(self, update_id: str | None = None) -> Reply:
        """As `ControlClient.status`."""
        return await self._run(lambda client: client.status(update_id))

    async def weight_info(self) -> Reply:
        """As `ControlClient.weight_info`."""
        return await self._run(lambda client: client.weight_info())

    async def update_weights_from_disk(
        self,
        path: str,
        weight_version: str | None = None,
        *,
        mode: str | None = None,
        subset: Sequence[str] | None = None,
        base_version: str | None = None,
        expect_digest: str | None = None,
        deadline_s: float | None = None,
    ) -> Reply:
        """As `ControlClient.update_weights_from_disk`."""
        return await self._run(
            lambda client: client.update_weights_from_disk(
                path,
                weight_version,
                mode=mode,
                subset=subset,
                base_version=base_version,
                expect_digest=expect_digest,
                deadline_s=deadline_s,
            )
        )

    async def rollback(
        self, to_version: str | None = None, mode: str | None = None
    ) -> Reply:
        """As `ControlClient.rollback`."""
        return await self._run(lambda client: client.rollback(to_version, mode))

    def pause(
        self,
        mode: str = "in_place",
        *,
        lease_s: float | None = None,
        owner: str | None = None,
        flush_cache: bool = False,
    ) -> AsyncPause:
        """As `ControlClient.pause`: await it, or use it in `async with`."""
        client = self._client
        pause = client._controls.pause(
            client._timeout_s,
            mode=mode,
            lease_s=lease_s,
            owner=owner,
            flush_cache=flush_cache,
        )
        return AsyncPause(pause, self._calls, client._timeout_s)

    async def continue_(self, owner: str | None = None) -> Reply:
        """As `ControlClient.continue_`."""
        return await self._run(lambda client: client.continue_(owner))

    async def is_paused(self) -> bool:
        """As `ControlClient.is_paused`."""
        return await self._run(lambda client: client.is_paused())

    async def pause_state(self) -> Reply:
        """As `ControlClient.pause_state`."""
        return await self._run(lambda client: client.pause_state())

    async def abort(self, update_id: str | None = None) -> Reply:
        """As `ControlClient.abort`."""
        return await self._run(lambda client: client.abort(update_id))

    async def wait_for(self, version: str, timeout_s: float | None = None) -> Reply:
        """As `ControlClient.wait_for`."""
        return await self._run(lambda client: client.wait_for(version), timeout_s)

    async def close(self) -> None:
        """Close the connections. Idempotent.

        Calls whose tasks were cancelled have some seconds to end.
        """
        await self._calls.settle()
        self._client.close()

    async def __aenter__(self) -> AsyncControlClient:
        """The client, closed at the end of the `async with`."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()

    async def _run(
        self, call: Callable[[ControlClient], T], timeout_s: float | None = None
    ) -> T:
        budget = self._client._budget(timeout_s)
        client = _BoundClient(self._client, budget)
        return await self._calls.run(partial(call, client), budget)


def _only(replies: Replies) -> Reply:
    """The reply of the only engine."""
    (reply,) = replies.values()
    return reply
