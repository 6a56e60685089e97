"""An engine behind HTTP: sends the key, raises typed errors, repeats lost calls."""

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
"""Longest wait for one reply before the call is repeated, in seconds."""

PASSING = (502, 503, 504)
"""Statuses of a proxy, or of a server that is starting; the call is repeated."""

UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors of httpx from before the first byte of a request was sent."""


class NotReached(EngineUnreachable):
    """No connection was made, so the engine did not get the call."""


class HttpEngine:
    """Implements `Engine` for a `vllm serve`.

    Args:
        url: the address of the control routes.
        key: the key of the control routes.

    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.name = url.rstrip("/")
        self._client = connect(self.name, key)

    def start(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        return self._ask("POST", "/start_weight_update", retry_budget, body)

    def update(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """`POST /update_weights`; a commit with mode `wait` may take long."""
        reply_s = retry_budget.timeout_s if "finish" in body else None
        return self._ask("POST", "/update_weights", retry_budget, body, reply_s)

    def update_by_body(self, body: bytes, retry_budget: RetryBudget) -> Reply:
        """`POST /update_weights_from_tensor` with a chunk of `bodies`."""
        path = "/update_weights_from_tensor"
        return self._ask("POST", path, retry_budget, body, retry_budget.timeout_s)

    def prepare(self, update_id: str, retry_budget: RetryBudget) -> Reply:
        """`POST /prepare_weight_update`; the reply waits for the verification."""
        body = {"update_id": update_id}
        return self._ask("POST", "/prepare_weight_update", retry_budget, body)

    def finish(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """`POST /finish_weight_update`; with mode `wait` the reply may take long."""
        return self._ask(
            "POST", "/finish_weight_update", retry_budget, body, retry_budget.timeout_s
        )

    def abort(self, update_id: str | None, retry_budget: RetryBudget) -> Reply:
        """`POST /abort_weight_update`; None aborts the update that is under way."""
        body = {"update_id": update_id}
        return self._ask("POST", "/abort_weight_update", retry_budget, body)

    def rollback(
        self, to_version: str | None, retry_budget: RetryBudget, mode: str | None = None
    ) -> Reply:
        """Serve the version before again; with mode `wait` the reply may take long."""
        body = {"to_version": to_version} | ({} if mode is None else {"mode": mode})
        path, reply_s = (
            "/rollback_weights",
            None if mode is None else retry_budget.timeout_s,
        )
        return self._ask("POST", path, retry_budget, body, reply_s, is_repeated=False)

    def status(self, update_id: str | None, retry_budget: RetryBudget) -> Reply:
        one = "" if update_id is None else f"/{update_id}"
        return self._ask("GET", f"/weight_update{one}", retry_budget)

    def info(self, retry_budget: RetryBudget) -> Reply:
        return self._ask("GET", "/weight_info", retry_budget)

    def names(self, retry_budget: RetryBudget) -> Reply:
        return self._ask("GET", "/weight_names", retry_budget)

    def update_from_disk(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """Serve a checkpoint of the server's host; `body` names its update."""
        path = "/update_weights_from_disk"
        return self._ask("POST", path, retry_budget, body, retry_budget.timeout_s)

    def pause(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """Pause, or renew a pause; with mode `wait` the reply may take long."""
        return self._ask(
            "POST", "/pause_generation", retry_budget, body, retry_budget.timeout_s
        )

    def resume(self, owner: str | None, retry_budget: RetryBudget) -> Reply:
        """Continue decoding after a pause."""
        return self._ask("POST", "/continue_generation", retry_budget, {"owner": owner})

    def pause_state(self, retry_budget: RetryBudget) -> Reply:
        """Whether decoding is paused, in which mode, and by which owner."""
        return self._ask("GET", "/is_paused", retry_budget)

    def init_transport(self, init_info: Reply, retry_budget: RetryBudget) -> Reply:
        """Connect the configured backend, once: made twice it is refused as busy."""
        path, body = "/init_weight_transfer_engine", {"init_info": init_info}
        return self._ask(
            "POST", path, retry_budget, body, retry_budget.timeout_s, is_repeated=False
        )

    def shutdown_transport(self, retry_budget: RetryBudget) -> Reply:
        """Close the backend's connection."""
        return self._ask("POST", "/shutdown_weight_transfer_engine", retry_budget, {})

    def world_size(self, retry_budget: RetryBudget) -> Reply:
        """The number of workers: `GET /get_world_size`."""
        return self._ask("GET", "/get_world_size", retry_budget)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(
        self,
        method: str,
        path: str,
        retry_budget: RetryBudget,
        body: Reply | bytes | None = None,
        reply_s: float | None = None,
        *,
        is_repeated: bool = True,
    ) -> Reply:
        delay = FIRST_DELAY_S
        failure: type[EngineUnreachable] = NotReached
        content: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            content = {"content": body, "headers": {"Content-Type": "application/json"}}
        while True:
            retry_budget.require()
            try:
                timeout = max(0.05, min(reply_s or REPLY_S, retry_budget.left()))
                response = self._client.request(
                    method, path, timeout=timeout, **content
                )
                failure = EngineUnreachable
                known = _decoded(response)
                if known is not None:
                    retry_budget.note("")
                    return known
                trouble = f"HTTP {response.status_code}"
                if response.status_code not in PASSING:
                    hint = (
                        "the log of the server says why"
                        if response.status_code == 500
                        else "is this a vLLM with vllm-inflight, and its "
                        "--inflight-port if it has one?"
                    )
                    raise EngineFault(
                        f"{method} {path} was answered by {trouble} "
                        f"{response.text[:200]!r}; {hint}"
                    )
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__} {error}".strip()
                if not isinstance(error, UNSENT):
                    failure = EngineUnreachable
            if not is_repeated:
                raise failure(f"no reply to {method} {path} ({trouble})")
            waits_for = f"{self.name}: no answer to {method} {path} yet ({trouble})"
            if not retry_budget.pause(delay, waits_for):
                retry_budget.require()
                raise failure(
                    f"no answer to {method} {path} within "
                    f"{round(retry_budget.timeout_s, 1):g} s ({trouble})"
                )
            delay = min(2 * delay, LAST_DELAY_S)


def control_key(given: str | None) -> str | None:
    """The key of the control routes: the given one, or that of the environment."""
    return given or admin_key() or os.environ.get("VLLM_API_KEY")


def _decoded(response: httpx.Response) -> Reply | None:
    """The reply of a control route; None if another program answered.

    Raises:
        InflightError: the error in the reply.

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
