"""Load on a core, and how the tests ask it for things that may come later."""

from concurrent.futures import Future
from typing import Any

from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, prompt
from tests.support.simulated.graph import Graph
from tests.support.simulated.worker import Drafting, DraftingAhead, Windowed

LABELS = {0: "default", 1: "one", 2: "two"}
"""What the simulated weights are called."""

KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, in process": {"kind": EngineCore},
    "async": {"is_async": True},
    "async, in process": {"is_async": True, "kind": EngineCore},
    "pipeline": {"pipeline_parallel_size": 2},
    "pipeline, Ray's graph": {"pipeline_parallel_size": 2, "executor": Graph},
    "two groups, sliding window": {"executor": Windowed},
    "drafts": {"executor": Drafting},
    "drafts, async": {"executor": DraftingAhead, "is_async": True},
}
"""The ways in which a core steps."""


def started(core: EngineCore, count: int = 3, length: int = 40) -> Streams:
    """A core in the middle of `count` requests."""
    for seed in range(count):
        add(core, f"r{seed}", prompt(seed, length))
    return Streams(core).step(8)


def ask(core: EngineCore, method: str, **body: Any) -> Future[Any]:
    """A control call whose answer may come later, as a Future either way."""
    answer = core.inflight(method, body)
    if isinstance(answer, Future):
        return answer
    done: Future[Any] = Future()
    done.set_result(answer)
    return done


def answered(future: Future[Any]) -> Any:
    assert future.done()
    return future.result()


def code(answer: Any) -> str:
    return answer["error"]["code"]


def count(streams: Streams) -> int:
    return sum(len(tokens) for tokens in streams.tokens.values())
