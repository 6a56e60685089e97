"""The engines a trainer can publish to, behind one small protocol.

An engine is reached over HTTP, or it is an `LLM` or `AsyncLLM` of this process.
Every call but a rollback names its update, so it may be repeated: when a reply is lost,
the same call is made again until the caller's patience ends. What an engine says no
to is raised as the error it names and not tried again.
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
    """What a publish asks of an engine; replies are those of the HTTP routes."""

    name: str
    """As errors and outcomes call it."""

    def start(self, body: Reply, patience: RetryBudget) -> Reply:
        """`POST /start_weight_update`."""
        ...

    def update(self, body: Reply, patience: RetryBudget) -> Reply:
        """`POST /update_weights`; returns when every rank has the chunk."""
        ...

    def prepare(self, update_id: str, patience: RetryBudget) -> Reply:
        """`POST /prepare_weight_update`; returns when every rank has voted."""
        ...

    def finish(self, body: Reply, patience: RetryBudget) -> Reply:
        """`POST /finish_weight_update`."""
        ...

    def abort(self, update_id: str, patience: RetryBudget) -> Reply:
        """`POST /abort_weight_update`."""
        ...

    def rollback(
        self, to_version: str | None, patience: RetryBudget, mode: str | None = None
    ) -> Reply:
        """`POST /rollback_weights`, once: made twice it goes forth again."""
        ...

    def status(self, update_id: str | None, patience: RetryBudget) -> Reply:
        """`GET /weight_update/{update_id}`, or of all that is known."""
        ...

    def info(self, patience: RetryBudget) -> Reply:
        """`GET /weight_info`."""
        ...

    def names(self, patience: RetryBudget) -> Reply:
        """`GET /weight_names`."""
        ...

    def pause(self, body: Reply, patience: RetryBudget) -> Reply:
        """`POST /pause_generation`."""
        ...

    def resume(self, owner: str | None, patience: RetryBudget) -> Reply:
        """`POST /continue_generation`."""
        ...

    def pause_state(self, patience: RetryBudget) -> Reply:
        """`GET /is_paused`; an engine of this process has `is_paused` alone."""
        ...

    def close(self) -> None:
        """Let connections go; the engine itself runs on."""
        ...


class InProcessEngine:
    """An `LLM` or an `AsyncLLM` of this process.

    The methods of an `AsyncLLM` run on its event loop, so that loop has to be
    running and must not be the thread that waits here.
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

    def start(self, body: Reply, patience: RetryBudget) -> Reply:
        """Open an update."""
        return self._run(patience, self._engine.start_weight_update, **body)

    def update(self, body: Reply, patience: RetryBudget) -> Reply:
        """Have a chunk received."""
        info = {"update_info": body["update_info"]}
        ids = {"update_id": body["update_id"], "chunk": body["chunk"]}
        return self._run(patience, self._engine.update_weights, info, **ids)

    def prepare(self, update_id: str, patience: RetryBudget) -> Reply:
        """Verify and vote."""
        return self._run(patience, self._engine.prepare_weight_update, update_id)

    def finish(self, body: Reply, patience: RetryBudget) -> Reply:
        """Verify and commit.

        It goes on when it is not waited for any longer: several engines behind one
        `AsyncLLM` are then taken back that could not all commit.
        """
        finish = self._engine.finish_weight_update
        return self._run(patience, finish, is_given_up=False, **body)

    def abort(self, update_id: str, patience: RetryBudget) -> Reply:
        """Give an update up."""
        return self._run(patience, self._engine.abort_weight_update, update_id)

    def rollback(
        self, to_version: str | None, patience: RetryBudget, mode: str | None = None
    ) -> Reply:
        """Serve the version before again."""
        rollback = self._engine.rollback_weights
        if mode is None:
            return self._run(patience, rollback, to_version)
        return self._run(patience, rollback, to_version, mode=mode)

    def status(self, update_id: str | None, patience: RetryBudget) -> Reply:
        """Where an update stands, or all that is known."""
        return self._run(patience, self._engine.weight_update_status, update_id)

    def info(self, patience: RetryBudget) -> Reply:
        """What is served."""
        return self._run(patience, self._engine.weight_info)

    def names(self, patience: RetryBudget) -> Reply:
        """Name, shape and dtype of every tensor that an update may bring."""
        return self._run(patience, self._engine.weight_names)

    def pause(self, body: Reply, patience: RetryBudget) -> Reply:
        """Pause, or renew a pause."""
        return self._run(patience, self._engine.pause_generation, **body)

    def resume(self, owner: str | None, patience: RetryBudget) -> Reply:
        """Continue decoding after a pause."""
        return self._run(patience, self._engine.continue_generation, owner)

    def pause_state(self, patience: RetryBudget) -> Reply:
        """Whether decoding is paused."""
        # The method returns a plain truth value.
        return {"is_paused": bool(self._run(patience, self._engine.is_paused))}

    def close(self) -> None:
        """Nothing to close."""

    def _run(
        self,
        patience: RetryBudget,
        method: Callable[..., Any],
        *args: Any,
        is_given_up: bool = True,
        **kwargs: Any,
    ) -> Reply:
        if self.loop is None:
            reply: Reply = method(*args, **kwargs)
            return reply
        future = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop)
        try:
            reply = future.result(patience.left())
        except concurrent.futures.TimeoutError:
            if is_given_up:
                future.cancel()
            raise EngineUnreachable(
                f"no answer to {method.__name__} within "
                f"{round(patience.timeout_s, 1):g} s; is the engine's event loop "
                "running?"
            ) from None
        return reply


def connect(
    engines: Any, *, api_key: str | None, loop: asyncio.AbstractEventLoop | None
) -> list[Engine]:
    """The engines of `engines`: URLs or objects, one or a sequence of them.

    Raises:
        ConfigError: one of them is no engine, or there twice, or there is none.

    """
    several = isinstance(engines, Sequence) and not isinstance(engines, str)
    given = list(engines) if several else [engines]
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
    """The error, with the engine's name in its message and its remedy beside it."""
    if isinstance(error, InflightError):
        error.add_note(error.remedy)
        return retold(error, f"{engine.name}: {error.message}")
    error.add_note(f"from engine {engine.name}")
    return error


def retold(error: InflightError, message: str) -> InflightError:
    """The error, with another message."""
    error.message = message
    return error
