"""One life of requests under a pause and an update, through any door.

As a script: python -m tests.support.engines.matrix LLM|AsyncLLM TP DP OLD NEW; prints
what happened as JSON.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import Any, Protocol

import httpx

from tests.support.api_servers import ApiServer
from tests.support.engines import gentle
from tests.support.engines.script import tell
from tests.support.serving import Server
from tests.support.waiting import until

NUM_REQUESTS = 4
NUM_TOKENS = 300
"""Of a request; its steps are gentle.py's, so that it does not end before the pause."""
PAUSE_S = 0.3


class Door(Protocol):
    """What the life below asks of an engine."""

    def send(self, prompts: list[list[int]], count: int) -> list[Future[Any]]:
        """Have `count` tokens generated for each; results are (tokens, spans)."""
        ...

    def call(self, name: str, **arguments: Any) -> Any:
        """A control call by the name of its method."""
        ...

    def num_begun(self) -> int:
        """How many of the requests that run have at least one token."""
        ...


def prompt(seed: int) -> list[int]:
    return [(11 * seed + 5 * i) % 250 for i in range(40)]


def live(door: Door, path: str, label: str, mode: str) -> dict[str, Any]:
    """Requests that are paused, updated and let go on in their middle."""
    life = live_once(door, path, label, mode)
    prompts, done = life.pop("prompts"), life.pop("told")
    first = [spans[0]["end"] for _, spans in done]
    # What the weights now live make of the same texts, begun anew.
    texts = [p + t[:k] for p, (t, _), k in zip(prompts, done, first, strict=True)]
    left = min(NUM_TOKENS - k for k in first)
    assert left > 0, "a request ended before the pause"
    again = [future.result(timeout=120) for future in door.send(texts, left)]
    rest = [t[k : k + left] for (t, _), k in zip(done, first, strict=True)]
    same = [r == t for r, (t, _) in zip(rest, again, strict=True)]
    return life | {"same as begun anew": same}


def live_once(
    door: Door, path: str, label: str, mode: str, num_tokens: int = NUM_TOKENS
) -> dict[str, Any]:
    """The same without what comes after; `told` has the tokens and spans of each."""
    prompts = [prompt(seed) for seed in range(NUM_REQUESTS)]
    sent = begun_together(door, prompts, num_tokens)
    reply = door.call("pause_generation", mode=mode, flush_cache=False)
    num_paused = [
        engine["num_running"] + engine["num_waiting"]
        for engine in reply.get("engines", [reply])
    ]
    is_paused = door.call("is_paused")
    time.sleep(PAUSE_S)
    updated = door.call("update_weights_from_disk", path=path, weight_version=label)
    door.call("continue_generation")
    done = [future.result(timeout=120) for future in sent]
    return {
        "prompts": prompts,
        "told": done,
        "paused": sum(num_paused),
        "paused in each": num_paused,
        "is_paused": is_paused,
        "label": updated["weight_version"],
        "counts": [len(tokens) for tokens, _ in done],
        "versions": [[span["version"] for span in spans] for _, spans in done],
    }


def begun_together(
    door: Door, prompts: list[list[int]], num_tokens: int
) -> list[Future[Any]]:
    """Requests that run at one time on any machine: a pause has gathered them."""
    door.call("pause_generation", mode="in_place", flush_cache=False)
    sent = door.send(prompts, num_tokens)

    def are_here() -> bool:
        reply = door.call("pause_generation", mode="in_place", flush_cache=False)
        engines = reply.get("engines", [reply])
        num_here = sum(e["num_running"] + e["num_waiting"] for e in engines)
        assert not any(each.done() for each in sent), "a request ended before"
        return num_here == NUM_REQUESTS

    until(are_here, "the requests did not arrive", 120)
    door.call("continue_generation")
    until(lambda: door.num_begun() == NUM_REQUESTS, "not all have begun", 120)
    return sent


def both(door: Door, old: str, new: str) -> dict[str, Any]:
    """In place to the new weights, and by retraction back to the old ones."""
    door.call("update_weights_from_disk", path=old, weight_version="old")
    return {
        "in_place": live(door, new, "new", "in_place"),
        "retract": live(door, old, "old", "retract"),
    }


def result_of(output: Any) -> Any:
    (choice,) = output.outputs
    return list(choice.token_ids), [vars(span) for span in choice.weight_versions]


def num_begun(engine: Any) -> int:
    """Of an engine of this process, by what its front end has received."""
    states = list(engine.output_processor.request_states.values())
    return sum(state.detokenizer.num_output_tokens() > 0 for state in states)


class Offline:
    """`LLM`: generates in a thread while this one controls it."""

    def __init__(self, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.pool = ThreadPoolExecutor(1)

    def send(self, prompts: list[list[int]], count: int) -> list[Future[Any]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        inputs = [{"prompt_token_ids": tokens} for tokens in prompts]
        whole = self.pool.submit(self.llm.generate, inputs, params, use_tqdm=False)
        parts: list[Future[Any]] = [Future() for _ in prompts]

        def split(done: Future[Any]) -> None:
            for part, output in zip(parts, done.result(), strict=True):
                part.set_result(result_of(output))

        whole.add_done_callback(split)
        return parts

    def call(self, name: str, **arguments: Any) -> Any:
        return getattr(self.llm, name)(**arguments)

    def num_begun(self) -> int:
        return num_begun(self.llm.llm_engine)

    def close(self) -> None:
        self.pool.shutdown()
        self.llm.llm_engine.engine_core.shutdown()


class Online:
    """`AsyncLLM`, in the loop of another thread."""

    def __init__(self, **options: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(self.loop.run_forever)
        args = AsyncEngineArgs(**options)

        async def start() -> Any:
            return AsyncLLM.from_engine_args(args)

        self.engine = self.run(start()).result()
        self.sent = 0

    def run(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def send(self, prompts: list[list[int]], count: int) -> list[Future[Any]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def one(tokens: list[int], name: str) -> Any:
            params = SamplingParams(
                temperature=0,
                max_tokens=count,
                ignore_eos=True,
                output_kind=RequestOutputKind.CUMULATIVE,
            )
            inputs = {"prompt_token_ids": tokens}
            async for output in self.engine.generate(inputs, params, name):
                last = output
            return result_of(last)

        self.sent += len(prompts)
        names = [f"r{self.sent}-{index}" for index in range(len(prompts))]
        return [self.run(one(p, n)) for p, n in zip(prompts, names, strict=True)]

    def call(self, name: str, **arguments: Any) -> Any:
        return self.run(getattr(self.engine, name)(**arguments)).result(timeout=120)

    def num_begun(self) -> int:
        return num_begun(self.engine)

    def close(self) -> None:
        self.engine.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.pool.shutdown()


class Served:
    """A server, or the API servers of one, which take turns.

    Attributes:
        replies: the spans of each request that has ended, and the headers with them.

    """

    def __init__(self, *servers: Server | ApiServer) -> None:
        self.pool = ThreadPoolExecutor(NUM_REQUESTS)
        self.replies: list[tuple[list[dict[str, Any]], httpx.Headers]] = []
        self._turns = cycle(servers)

    def send(self, prompts: list[list[int]], count: int) -> list[Future[Any]]:
        sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}

        def one(tokens: list[int]) -> Any:
            body = {"token_ids": tokens, "sampling_params": sampling}
            reply = self._ask("POST", "/inference/v1/generate", body)
            told = reply.json()
            assert "choices" in told, told
            (choice,) = told["choices"]
            self.replies.append((choice["weight_versions"], reply.headers))
            return choice["token_ids"], choice["weight_versions"]

        return [self.pool.submit(one, tokens) for tokens in prompts]

    def call(self, name: str, **arguments: Any) -> Any:
        if name == "is_paused":
            return self._ask("GET", "/is_paused").json()["is_paused"]
        return self._ask("POST", f"/{name}", arguments).json()

    def num_begun(self) -> int:
        # Told after a step, and these prompts take one: who runs has a token by then.
        lines = self._ask("GET", "/metrics").text.splitlines()
        gauge = "vllm:num_requests_running{"
        return sum(int(float(x.split()[-1])) for x in lines if x.startswith(gauge))

    def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return next(self._turns).request(method, path, body)


DOORS: dict[str, Callable[..., Any]] = {"LLM": Offline, "AsyncLLM": Online}


def main(kind: str, tp: str, dp: str, old: str, new: str) -> None:
    door = DOORS[kind](
        model=old,
        dtype="float32",
        tensor_parallel_size=int(tp),
        data_parallel_size=int(dp),
        max_model_len=1024,
        block_size=32,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=True,
        logits_processors=[gentle.NAME],
    )
    seen = both(door, old, new)
    door.close()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if sys.argv[2:4] != ["1", "1"]:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(*sys.argv[1:])
