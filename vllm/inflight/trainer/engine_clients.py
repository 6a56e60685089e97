"""The engines that a trainer can publish to, behind one small protocol.

An engine is a server reached over HTTP, or an `LLM` or `AsyncLLM` of this process.
Every call except a rollback names its update, so it can be repeated. When a reply is
lost, the same call is made again until the retry budget is spent. When an engine
rejects a call, its error is raised and the call is not repeated.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm.inflight.errors import ConfigError, EngineUnreachable, InflightError
from vllm.inflight.trainer.http_client import HttpEngine, Reply, control_key
from vllm.inflight.trainer.retry import RetryBudget


class Engine(Protocol):
    """The calls of a publish. The replies are those of the HTTP routes.

    Raises:
        EngineUnreachable: the engine did not answer within the retry budget.
        InflightError: the engine rejected the call.

    """

    name: str
    """The name of the engine in errors and outcomes."""

    def start(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """`POST /start_weight_update`."""
        ...

    def update(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """`POST /update_weights`; returns when every rank has the chunk."""
        ...

    def update_by_body(self, body: bytes, retry_budget: RetryBudget) -> Reply:
        """`POST /update_weights_from_tensor`; returns when every rank has the chunk."""
        ...

    def prepare(self, update_id: str, retry_budget: RetryBudget) -> Reply:
        """`POST /prepare_weight_update`; returns when every rank has reported."""
        ...

    def finish(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """`POST /finish_weight_update`."""
        ...

    def abort(self, update_id: str, retry_budget: RetryBudget) -> Reply:
        """`POST /abort_weight_update`."""
        ...

    def rollback(
        self, to_version: str | None, retry_budget: RetryBudget, mode: str | None = None
    ) -> Reply:
        """`POST /rollback_weights`, once: made twice it goes forth again."""
        ...

    def status(self, update_id: str | None, retry_budget: RetryBudget) -> Reply:
        """`GET /weight_update/{update_id}`, or `GET /weight_update` without an id."""
        ...

    def info(self, retry_budget: RetryBudget) -> Reply:
        """`GET /weight_info`."""
        ...

    def names(self, retry_budget: RetryBudget) -> Reply:
        """`GET /weight_names`."""
        ...

    def pause(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """`POST /pause_generation`."""
        ...

    def resume(self, owner: str | None, retry_budget: RetryBudget) -> Reply:
        """`POST /continue_generation`."""
        ...

    def pause_state(self, retry_budget: RetryBudget) -> Reply:
        """`GET /is_paused`; an engine of this process has `is_paused` alone."""
        ...

    def close(self) -> None:
        """Close connections; the engine runs on."""
        ...


class InProcessEngine:
    """An `LLM` or an `AsyncLLM` of this process.

    The methods of an `AsyncLLM` run on its event loop. The loop must be running, in
    another thread than the caller's.

    Raises:
        ConfigError: the object is not an engine of this package, or the loop of an
            `AsyncLLM` is not known.

    """

    def __init__(
        self, engine: Any, name: str, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        start = getattr(engine, "start_weight_update", None)
        if start is None or not hasattr(engine, "abort_weight_update"):
            raise ConfigError(
                f"{type(engine).__name__} is not an engine with vllm-inflight; give "
                "an LLM, an AsyncLLM or the URL of a server"
            )
        self.name = name
        self._engine = engine
        self.loop = loop
        """The loop of an `AsyncLLM`; None for an `LLM`."""
        if not inspect.iscoroutinefunction(start):
            self.loop = None
        elif loop is None:
            try:
                self.loop = asyncio.get_running_loop()
            except RuntimeError:
                raise ConfigError(
                    "make the publisher of an AsyncLLM on the engine's event loop, or "
                    "give it that loop with loop="
                ) from None

    def start(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        return self._run(retry_budget, self._engine.start_weight_update, **body)

    def update(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        info = {"update_info": body["update_info"]}
        ids = {"update_id": body["update_id"], "chunk": body["chunk"]}
        return self._run(retry_budget, self._engine.update_weights, info, **ids)

    def update_by_body(self, body: bytes, retry_budget: RetryBudget) -> Reply:
        """An engine of this process takes no requests."""
        raise ConfigError("wire='http' is for servers, which are given by their URLs")

    def prepare(self, update_id: str, retry_budget: RetryBudget) -> Reply:
        return self._run(retry_budget, self._engine.prepare_weight_update, update_id)

    def finish(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """Verify and commit; the call goes on after the retry budget is spent.

        Several engines behind one `AsyncLLM` can then still roll back if not all of
        them could commit.
        """
        finish = self._engine.finish_weight_update
        return self._run(retry_budget, finish, is_given_up=False, **body)

    def abort(self, update_id: str, retry_budget: RetryBudget) -> Reply:
        return self._run(retry_budget, self._engine.abort_weight_update, update_id)

    def rollback(
        self, to_version: str | None, retry_budget: RetryBudget, mode: str | None = None
    ) -> Reply:
        """Serve the version before again."""
        rollback = self._engine.rollback_weights
        if mode is None:
            return self._run(retry_budget, rollback, to_version)
        return self._run(retry_budget, rollback, to_version, mode=mode)

    def status(self, update_id: str | None, retry_budget: RetryBudget) -> Reply:
        return self._run(retry_budget, self._engine.weight_update_status, update_id)

    def info(self, retry_budget: RetryBudget) -> Reply:
        return self._run(retry_budget, self._engine.weight_info)

    def names(self, retry_budget: RetryBudget) -> Reply:
        return self._run(retry_budget, self._engine.weight_names)

    def pause(self, body: Reply, retry_budget: RetryBudget) -> Reply:
        """Pause, or renew a pause."""
        return self._run(retry_budget, self._engine.pause_generation, **body)

    def resume(self, owner: str | None, retry_budget: RetryBudget) -> Reply:
        """Continue decoding after a pause."""
        return self._run(retry_budget, self._engine.continue_generation, owner)

    def pause_state(self, retry_budget: RetryBudget) -> Reply:
        """Whether decoding is paused."""
        # The method returns a plain truth value.
        return {"is_paused": bool(self._run(retry_budget, self._engine.is_paused))}

    def close(self) -> None:
        pass

    def _run(
        self,
        retry_budget: RetryBudget,
        method: Callable[..., Any],
        *args: object,
        is_given_up: bool = True,
        **kwargs: object,
    ) -> Reply:
        if self.loop is None:
            reply: Reply = method(*args, **kwargs)
            return reply
        future = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop)
        try:
            reply = future.result(retry_budget.left())
        except concurrent.futures.TimeoutError:
            if is_given_up:
                future.cancel()
            raise EngineUnreachable(
                f"no answer to {method.__name__} within "
                f"{round(retry_budget.timeout_s, 1):g} s; is the engine's event loop "
                "running?"
            ) from None
        return reply


def connect(
    engines: object, *, api_key: str | None, loop: asyncio.AbstractEventLoop | None
) -> list[Engine]:
    """The clients of one engine or a sequence of engines, given by URL or as objects.

    Raises:
        ConfigError: an object is not an engine, an engine is named twice, or the
            sequence is empty.

    """
    given: list[object] = [engines]
    if isinstance(engines, Sequence) and not isinstance(engines, str):
        given = list(engines)
    if not given:
        raise ConfigError("there is no engine to publish to")
    key = control_key(api_key)
    found: list[Engine] = []
    for index, one in enumerate(given):
        if isinstance(one, str):
            found.append(HttpEngine(one, key))
        else:
            number = f" {index}" if len(given) > 1 else ""
            found.append(InProcessEngine(one, type(one).__name__ + number, loop))
    names = [engine.name for engine in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"engine {name} is named twice")
    return found


def blamed(error: BaseException, engine: Engine) -> BaseException:
    """The same error, with the engine's name in its message, its remedy as note."""
    if isinstance(error, InflightError):
        error.add_note(error.remedy)
        return with_message(error, f"{engine.name}: {error.message}")
    error.add_note(f"from engine {engine.name}")
    return error


def with_message(error: InflightError, message: str) -> InflightError:
    """The same error, with another message."""
    error.message = message
    return error
