"""An engine with processes of its own, and its clients, all in a thread of this one."""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from tests.support.gpu.exact import EXACT
from tests.support.waiting import until
from vllm.inflight.api.control.methods import control_of

PATIENCE_S = 180.0
"""For one call on a busy machine."""
SETTLED_TURNS = 1000
"""Turns of an event loop, of which a token takes few from the engine to its client."""
CPU_BIND = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass
class Choice:
    """What a client has of one choice of a request.

    Attributes:
        tokens: joined from all that came.
        logprobs: of those tokens, as the engine reported them.
        arrivals: when how many tokens came.
        spans: version spans, over all tokens.
        kv: spans of KV over positions.
        finish_reason: why it ended; None while it has not.
        broken: how what came does not continue what was there before.

    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    kv: list[Any] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    broken: list[str] = field(default_factory=list)

    def take(self, output: Any, is_delta: bool) -> None:
        """Add what one message of the engine says."""
        came = list(output.token_ids)
        values = [
            step[token].logprob
            for step, token in zip(output.logprobs or [], came, strict=True)
        ]
        if not is_delta:
            known = len(self.tokens)
            if came[:known] != self.tokens:
                self.broken.append(f"token {known}: what was sent has changed")
            came, values = came[known:], values[known:]
        if came:
            self.arrivals.append((time.monotonic(), len(came)))
        self.tokens += came
        self.logprobs += values
        self.text = self.text + output.text if is_delta else output.text
        self.spans = list(output.weight_versions or [])
        self.kv = list(getattr(output, "kv_versions", None) or [])
        self.finish_reason = output.finish_reason
        ends = [span.end for span in self.spans]
        starts = [span.start for span in self.spans]
        if starts != [0, *ends[:-1]][: len(starts)] or ends[-1:] not in (
            [len(self.tokens)],
            [],
        ):
            told = list(zip(starts, ends, strict=True))
            self.broken.append(f"{len(self.tokens)} tokens, but spans of {told}")


@dataclass
class Stream:
    """A request and its client.

    Attributes:
        engine: the number of the data-parallel engine that runs it.

    """

    prompt: list[int]
    params: Any
    choices: list[Choice]
    engine: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    future: Future[None] = field(default_factory=Future)

    @property
    def num_tokens(self) -> int:
        """Of the choice that has fewest."""
        return min(len(choice.tokens) for choice in self.choices)

    @property
    def first_token_at(self) -> float:
        """When its first token came."""
        return min(choice.arrivals[0][0] for choice in self.choices)


class Live:
    """An `AsyncLLM`; its methods block.

    Data-parallel engines take turns at the requests.

    Args:
        folder: the weights that it starts with.
        **options: of the engine.

    Attributes:
        gate: if there is one, an update is staged and proved, and is committed when
            this returns.

    """

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._commit: dict[str, Any] = {}
        self.gate: Callable[[], None] | None = None
        self._number = 0
        self.num_engines: int = options.get("data_parallel_size", 1)
        args = AsyncEngineArgs(model=folder, **options)

        async def start() -> Any:
            return AsyncLLM.from_engine_args(args)

        self.engine = self.later(start()).result()

    # ------------------------------------------------------------ control calls
    def later(self, work: Any) -> Future[Any]:
        """The future of a coroutine, run in the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, name: str, *args: Any, **arguments: Any) -> Any:
        """A method of the engine, by its name."""
        work = getattr(self.engine, name)(*args, **arguments)
        return self.later(work).result(timeout=PATIENCE_S)

    def control(self, name: str, *arguments: Any) -> Any:
        """The same of its `Control`, which knows more options."""
        work = getattr(control_of(self.engine), name)(*arguments)
        return self.later(work).result(timeout=PATIENCE_S)

    def pause(self, mode: str, **options: Any) -> Any:
        """Pause; returns the reply."""
        options.setdefault("flush_cache", False)
        return self.call("pause_generation", mode=mode, **options)

    # What a trainer asks of the inference side, as `LLM` has it.
    def init_weight_transfer_engine(self, request: Any) -> None:
        self.call("init_weight_transfer_engine", request)

    def start_weight_update(self) -> Any:
        return self.call("start_weight_update")

    def update_weights(self, request: Any, **options: Any) -> Any:
        is_last = "finish" in options
        if is_last and self.gate is None:
            options["finish"] = options["finish"] | self._commit
        elif is_last:
            del options["finish"]
        reply = self.call("update_weights", request, **options)
        if is_last and self.gate is not None:
            return self.finish_weight_update()
        if is_last:
            self.reply = reply
        return reply

    def finish_weight_update(self) -> Any:
        if self.gate is not None:
            self.call("prepare_weight_update")
            self.gate()
        self.reply = self.call("finish_weight_update", **self._commit)
        return self.reply

    @contextmanager
    def committing(self, **options: Any) -> Iterator[None]:
        """What a trainer's update is finished with meanwhile."""
        self._commit = options
        try:
            yield
        finally:
            self._commit = {}

    # ------------------------------------------------------------------ requests
    def send(self, prompt: list[int], params: Any, lora: Any = None) -> Stream:
        """Begin a request; its client reads until it ends."""
        engine = self._number % self.num_engines
        stream = Stream(prompt, params, [Choice() for _ in range(params.n)], engine)
        self._number += 1
        stream.future = self.later(self._read(stream, f"r{self._number}", lora))
        return stream

    async def _read(self, stream: Stream, name: str, lora: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        is_delta = stream.params.output_kind is RequestOutputKind.DELTA
        inputs = {"prompt_token_ids": stream.prompt}
        rank = stream.engine if self.num_engines > 1 else None
        async for output in self.engine.generate(
            inputs, stream.params, name, lora_request=lora, data_parallel_rank=rank
        ):
            rows = output.prompt_logprobs or []
            if len(rows) > len(stream.prompt_logprobs):
                tokens = output.prompt_token_ids[1:]
                stream.prompt_logprobs = [
                    row[token].logprob
                    for row, token in zip(rows[1:], tokens, strict=False)
                ]
            for each in output.outputs:
                stream.choices[each.index].take(each, is_delta)

    def wait(self, streams: list[Stream]) -> None:
        """Until all have ended; raises what went wrong with one."""
        for stream in streams:
            stream.future.result(timeout=PATIENCE_S)

    def settle(self) -> None:
        """Returns once the clients have all that was sent before the last reply.

        Tokens and replies of an engine come through one socket, in their order.
        """

        async def turns() -> None:
            for _ in range(SETTLED_TURNS):
                await asyncio.sleep(0)

        self.later(turns()).result(timeout=PATIENCE_S)

    def until_begun(self, streams: list[Stream], num_tokens: int) -> None:
        """Until each has so many tokens, or has ended."""

        def have() -> bool:
            return all(s.num_tokens >= num_tokens or s.future.done() for s in streams)

        until(have, "the requests did not begin", PATIENCE_S)

    def close(self) -> None:
        """End the engine with all of its processes."""
        self.engine.shutdown()

        async def rest() -> None:
            # Upstream's tasks read on until they are told not to.
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.later(rest()).result(timeout=PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        gc.collect()


@contextmanager
def live(folder: str, *, device: str, **options: Any) -> Iterator[Live]:
    """An engine for the length of a `with`."""
    variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} | EXACT
    sizes = (options.get(f"{way}_parallel_size", 1) for way in ("tensor", "data"))
    if device == "cpu" and max(sizes) > 1:
        variables[CPU_BIND] = "0|1"
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        engine = Live(folder, **options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    try:
        yield engine
    finally:
        engine.close()
