"""A server that is asked over HTTP: its key, its typed errors, its lost replies."""

from __future__ import annotations

import os
from typing import Any

import httpx

from vllm.inflight.config import admin_key
from vllm.inflight.connection import connect
from vllm.inflight.errors import EngineFault, EngineUnreachable, InflightError
from vllm.inflight.trainer.retry import FIRST_DELAY_S, LAST_DELAY_S, RetryBudget

Reply = dict[str, Any]

REPLY_S = 60.0
"""Longest wait for one reply before the call is made again."""

PASSING = (502, 503, 504)
"""What a proxy, or a server that is starting, answers in its place."""

UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""What httpx raises before the first byte of a request has left."""


class NotReached(EngineUnreachable):
    """No connection was made, so the engine knows nothing of the call."""


class HttpEngine:
    """A `vllm serve` somewhere."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.name = url.rstrip("/")
        self._client = connect(self.name, key)

    def start(self, body: Reply, patience: RetryBudget) -> Reply:
        """Open an update."""
        return self._ask("POST", "/start_weight_update", patience, body)

    def update(self, body: Reply, patience: RetryBudget) -> Reply:
        """Have a chunk received."""
        return self._ask("POST", "/update_weights", patience, body)

    def prepare(self, update_id: str, patience: RetryBudget) -> Reply:
        """Verify and vote; the reply takes as long as it takes to verify."""
        body = {"update_id": update_id}
        return self._ask("POST", "/prepare_weight_update", patience, body)

    def finish(self, body: Reply, patience: RetryBudget) -> Reply:
        """Verify and commit; with mode `wait` the reply may take long."""
        return self._ask(
            "POST", "/finish_weight_update", patience, body, patience.timeout_s
        )

    def abort(self, update_id: str | None, patience: RetryBudget) -> Reply:
        """Give an update up; None: whichever is under way."""
        body = {"update_id": update_id}
        return self._ask("POST", "/abort_weight_update", patience, body)

    def rollback(
        self, to_version: str | None, patience: RetryBudget, mode: str | None = None
    ) -> Reply:
        """Serve the version before again; with mode `wait` the reply may take long."""
        body = {"to_version": to_version} | ({} if mode is None else {"mode": mode})
        path, reply_s = (
            "/rollback_weights",
            None if mode is None else patience.timeout_s,
        )
        return self._ask("POST", path, patience, body, reply_s, is_repeated=False)

    def status(self, update_id: str | None, patience: RetryBudget) -> Reply:
        """Where an update stands, or all that is known."""
        one = "" if update_id is None else f"/{update_id}"
        return self._ask("GET", f"/weight_update{one}", patience)

    def info(self, patience: RetryBudget) -> Reply:
        """What is served."""
        return self._ask("GET", "/weight_info", patience)

    def names(self, patience: RetryBudget) -> Reply:
        """Name, shape and dtype of every tensor that an update may bring."""
        return self._ask("GET", "/weight_names", patience)

    def update_from_disk(self, body: Reply, patience: RetryBudget) -> Reply:
        """Serve a checkpoint of the server's host; `body` names its update."""
        path = "/update_weights_from_disk"
        return self._ask("POST", path, patience, body, patience.timeout_s)

    def pause(self, body: Reply, patience: RetryBudget) -> Reply:
        """Pause, or renew a pause; with mode `wait` the reply may take long."""
        return self._ask(
            "POST", "/pause_generation", patience, body, patience.timeout_s
        )

    def resume(self, owner: str | None, patience: RetryBudget) -> Reply:
        """Continue decoding after a pause."""
        return self._ask("POST", "/continue_generation", patience, {"owner": owner})

    def pause_state(self, patience: RetryBudget) -> Reply:
        """Whether decoding is paused, in which mode, and by which owner."""
        return self._ask("GET", "/is_paused", patience)

    def init_transport(self, init_info: Reply, patience: RetryBudget) -> Reply:
        """Connect the configured backend, once: made twice it is refused as busy."""
        path, body = "/init_weight_transfer_engine", {"init_info": init_info}
        return self._ask(
            "POST", path, patience, body, patience.timeout_s, is_repeated=False
        )

    def shutdown_transport(self, patience: RetryBudget) -> Reply:
        """Let the backend's connection go."""
        return self._ask("POST", "/shutdown_weight_transfer_engine", patience, {})

    def world_size(self, patience: RetryBudget) -> Reply:
        """How many workers there are."""
        return self._ask("GET", "/get_world_size", patience)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(
        self,
        method: str,
        path: str,
        patience: RetryBudget,
        body: Reply | None = None,
        reply_s: float | None = None,
        *,
        is_repeated: bool = True,
    ) -> Reply:
        delay = FIRST_DELAY_S
        failure: type[EngineUnreachable] = NotReached
        while True:
            patience.require()
            try:
                timeout = max(0.05, min(reply_s or REPLY_S, patience.left()))
                response = self._client.request(
                    method, path, json=body, timeout=timeout
                )
                failure = EngineUnreachable
                known = _decoded(response)
                if known is not None:
                    patience.note("")
                    return known
                trouble = f"HTTP {response.status_code}"
                if response.status_code not in PASSING:
                    raise EngineFault(
                        f"{method} {path} was answered by {trouble} "
                        f"{response.text[:200]!r}; is this a vLLM with vllm-inflight, "
                        "and its --inflight-port if it has one?"
                    )
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__} {error}".strip()
                if not isinstance(error, UNSENT):
                    failure = EngineUnreachable
            if not is_repeated:
                raise failure(f"no reply to {method} {path} ({trouble})")
            waits_for = f"{self.name}: no answer to {method} {path} yet ({trouble})"
            if not patience.pause(delay, waits_for):
                patience.require()
                raise failure(
                    f"no answer to {method} {path} within "
                    f"{round(patience.timeout_s, 1):g} s ({trouble})"
                )
            delay = min(2 * delay, LAST_DELAY_S)


def control_key(given: str | None) -> str | None:
    """The key of the control routes: the one given, else of the environment."""
    return given or admin_key() or os.environ.get("VLLM_API_KEY")


def _decoded(response: httpx.Response) -> Reply | None:
    """The reply of a control route; None if it is somebody else's answer.

    Raises:
        InflightError: the error that the reply names.

    """
    try:
        body = response.json()
    except ValueError:
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("code"), str):
        raise InflightError.from_dict(error)
    if response.is_success and isinstance(body, dict):
        return body
    return None
