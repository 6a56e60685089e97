"""An engine that trainers and files feed while its requests run; prints JSON.

Usage: python -m tests.support.engines.fed_engine KIND OLD NEW SOURCE...

KIND is `llm`, `async_llm`, `two_engines` or `seven_engines` of data parallelism, or
`two_ranks` of tensor parallelism in an `LLM`. A SOURCE is `files` or a backend of a
trainer's process. For each of them this tells the digests of every rank after versions
came, after a rollback, and after one rank refused what it got.
"""

import os
import sys
from collections.abc import Callable, Coroutine
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from tests.robustness.pauses.live import Live, Stream
from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import (
    GREEDY,
    NUM_PROMPTS,
    greedy,
    outputs_during,
    prompts,
)
from tests.support.engines.script import OPTIONS, tell
from tests.support.gpu.exact import be_exact
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import ReadChecksums, StartUpdate
from vllm.inflight.errors import InflightError
from vllm.inflight.transport.waiting import in_background

FILES = "files"
NUM_STREAMS = 4
LENGTH = 600
PATIENCE_S = 180.0
WRONG = "model.layers.0.mlp.dawn_proj.weight"
"""In the place of a name that the model knows."""

Digests = list[dict[str, str]]
"""Of every parameter, of each rank of each engine."""


class Engine:
    """An engine that another thread may call, while this one has requests run.

    Attributes:
        served: upstream's object.
        num_ranks: of all its engines together.
        is_last_refusing: whether the last rank gets a name that its model has not.

    """

    served: Any
    num_ranks = 1
    is_last_refusing = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine, waited for."""
        raise NotImplementedError

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """One of our methods, waited for."""
        raise NotImplementedError

    def tokens(self) -> list[list[int]]:
        """What the weights served make of eight prompts."""
        raise NotImplementedError

    def during(self, work: Callable[[], Any]) -> list[tuple[int, int]]:
        """Have requests run until `work`, in a thread, is done.

        Returns the number of tokens and of versions of each.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def digests(self) -> Digests:
        """Of what every rank serves."""
        replies = self.run(control_of(self.served).ask(ReadChecksums()))
        return [rank["checksums"] for reply in replies for rank in reply["ranks"]]

    # What a trainer asks of the inference side, as `LLM` has it.
    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, request: dict[str, Any], **options: Any) -> None:
        """A chunk, of which each rank gets its own description."""
        infos = [request["update_info"]] * self.num_ranks
        if self.is_last_refusing:
            _, *names = infos[-1]["names"]
            infos[-1] = infos[-1] | {"names": [WRONG, *names]}
        self.call("update_weights", {"update_info": infos}, **options)

    def finish_weight_update(self) -> None:
        self.call("finish_weight_update")


class Blocking(Engine):
    """An `LLM`, whose core is a process of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import LLM

        self.served = LLM(str(folder), **options)
        self.num_ranks = options.get("tensor_parallel_size", 1)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return run_sync(coroutine)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.served, method)(*arguments, **options)

    def tokens(self) -> list[list[int]]:
        return greedy(self.served)

    def during(self, work: Callable[[], Any]) -> list[tuple[int, int]]:
        params = repeat(sampling(LENGTH))
        outputs = outputs_during(work, self.served, NUM_STREAMS, params)
        choices = [output.outputs[0] for output in outputs]
        return [(len(c.token_ids), len(c.weight_versions)) for c in choices]

    def close(self) -> None:
        self.served.llm_engine.engine_core.shutdown()


class Async(Engine):
    """An `AsyncLLM`, on an event loop in a thread."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._live = Live(str(folder), **options)
        self.served = self._live.engine
        self.num_ranks = options.get("data_parallel_size", 1)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._live.later(coroutine).result(PATIENCE_S)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._live.call(method, *arguments, **options)

    def _begin(self, count: int, params: Any) -> list[Stream]:
        texts = [prompt["prompt_token_ids"] for prompt in prompts(count)]
        return [self._live.send(text, params) for text in texts]

    def tokens(self) -> list[list[int]]:
        streams = self._begin(NUM_PROMPTS, sampling(GREEDY.max_tokens))
        self._live.wait(streams)
        return [stream.choices[0].tokens for stream in streams]

    def during(self, work: Callable[[], Any]) -> list[tuple[int, int]]:
        streams = wave = self._begin(NUM_STREAMS, sampling(LENGTH))
        self._live.until_begun(wave, 1)
        working = in_background(work)
        self._live.wait(wave)
        while not working.done():
            wave = self._begin(NUM_STREAMS, sampling(LENGTH))
            self._live.wait(wave)
            streams = streams + wave
        working.result()
        choices = [stream.choices[0] for stream in streams]
        return [(len(choice.tokens), len(choice.spans)) for choice in choices]

    def close(self) -> None:
        self._live.close()


def sampling(length: int | None) -> Any:
    """Of a request of so many tokens; `Live` reads their log-probabilities."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=0)


KINDS: dict[str, tuple[type[Engine], dict[str, Any]]] = {
    "llm": (Blocking, {}),
    "async_llm": (Async, {}),
    "two_engines": (Async, {"data_parallel_size": 2}),
    "seven_engines": (Async, {"data_parallel_size": 7}),
    "two_ranks": (
        Blocking,
        {"tensor_parallel_size": 2, "enforce_eager": not torch.cuda.is_available()},
    ),
}


class Files:
    """A source whose trainer writes checkpoints; as `FarTrainer`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def send(self, folder: Path) -> None:
        """In one call; if a rank is to refuse, it gets a path that is not there."""
        engine = self._engine
        if not engine.is_last_refusing:
            engine.call("update_weights_from_disk", str(folder))
            return
        infos = [{"path": str(folder)}] * (engine.num_ranks - 1)
        infos.append({"path": str(folder / "nowhere")})
        control = control_of(engine.served)
        engine.run(control.start(StartUpdate(transport="local")))
        engine.call("update_weights", {"update_info": infos})
        engine.call("finish_weight_update")


def fed(engine: Engine, source: str, old: Path, new: Path) -> dict[str, Any]:
    """What one source does to an engine that serves `old`, and serves it in the end."""
    seen: dict[str, Any] = {}

    def trainer() -> Any:
        if source == FILES:
            return Files(engine)
        options = {"num_workers": engine.num_ranks, "bucket_bytes": 1 << 20}
        return FarTrainer(engine, source, old, **options)

    def work() -> None:
        for folder in (new, old, new):
            first.send(folder)
        seen["sent"] = engine.digests()
        engine.call("rollback_weights")
        seen["rolled back"] = engine.digests()
        engine.is_last_refusing = True
        try:
            first.send(new)
        except InflightError as error:
            seen["refused"] = error.code
        engine.is_last_refusing = False
        seen["after a refusal"] = engine.digests()

    with trainer() as first:
        streams = engine.during(work)
    seen["lengths"] = sorted({num_tokens for num_tokens, _ in streams})
    seen["versions"] = max(num_versions for _, num_versions in streams)
    with trainer() as second:  # the update that was refused has ended the first one
        second.send(new)
        seen["sent again"], seen["tokens"] = engine.digests(), engine.tokens()
    engine.call("rollback_weights")
    seen["rolled back again"], seen["old tokens"] = engine.digests(), engine.tokens()
    return seen


def main(kind: str, old: Path, new: Path, sources: list[str]) -> None:
    make, more = KINDS[kind]
    options = OPTIONS | {"dtype": "float32"} | more
    alone = {n: v for n, v in options.items() if n != "data_parallel_size"}
    fresh = Blocking(new, **alone)
    seen: dict[str, Any] = {"fresh": fresh.digests(), "tokens": fresh.tokens()}
    fresh.close()
    (backend,) = {source for source in sources if source != FILES} or {"local"}
    engine = make(old, **options, weight_transfer_config={"backend": backend})
    seen["old"], seen["old tokens"] = engine.digests(), engine.tokens()
    for source in sources:
        seen[source] = fed(engine, source, old, new)
    engine.close()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if torch.cuda.is_available():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        be_exact()  # the tokens of different batches are compared
    if sys.argv[1].startswith("two_"):
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
