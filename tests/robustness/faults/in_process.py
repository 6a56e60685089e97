"""Sequences of calls that harm vLLM as it is, on an `LLM` in one process.

As a script: python -m tests.robustness.faults.in_process OLD NEW NAME...; plays the
named ones on one engine and prints what was seen as JSON. With VLLM_PLUGINS="" in the
environment the engine is vLLM as it is, and a play may be its last.

Everything goes through upstream's own four phases and a transport that knows nothing of
vLLM in-flight.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm import SamplingParams

import tests.support.engines.transport  # (registers the transport "other")
from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell

NUM_TENSORS = 8
"""After which a transfer breaks off: in the middle of a layer."""
NUM_TENSORS_OF_LAYERS = 5
"""The same, at a place where a layer is just complete."""
LEFT_OUT = "model.layers.1.mlp.down_proj.weight"
TEXT = {"prompt_token_ids": [(7 * i) % 250 for i in range(100)]}

Seen = dict[str, Any]


class Stage:
    """One engine, and what a trainer asks of it.

    Attributes:
        llm: the engine.
        old: the checkpoint that it was started with.
        new: another.

    """

    def __init__(self, llm: Any, old: str, new: str) -> None:
        self.llm = llm
        self.old = old
        self.new = new

    def tokens(self) -> Any:
        """Of eight prompts, or what went wrong."""
        return outcome(lambda: greedy(self.llm))

    def start(self) -> Any:
        return outcome(self.llm.start_weight_update)

    def send(self, **faults: Any) -> Any:
        """The whole of `new`, with faults if any."""
        info = {"update_info": {"path": self.new, **faults}}
        return outcome(lambda: self.llm.update_weights(info))

    def finish(self, label: str) -> Any:
        return outcome(lambda: self.llm.finish_weight_update(weight_version=label))

    def label(self) -> Any:
        return outcome(self.llm.get_weight_version)

    def checksums(self) -> Any:
        """Upstream's own, of every parameter of rank 0."""
        return outcome(lambda: self.llm.collective_rpc("compute_weight_checksums")[0])

    def digest(self) -> Any:
        """What the engine says of the weights it serves, if it has anything to say."""
        return outcome(lambda: self.llm.weight_info()["digest"])

    def tidy(self) -> None:
        """Leave nothing open, and serve what was served in the beginning."""
        with suppress(Exception):
            self.llm.abort_weight_update()
        self.new, kept = self.old, self.new
        self.start(), self.send(), self.finish("old")
        self.new = kept


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns; if it raises, the error's type, code and text."""
    try:
        return call()
    except Exception as error:
        return {
            "raised": type(error).__name__,
            "code": getattr(error, "code", None),
            "text": str(error)[-2000:],
        }


def failed(step: Any) -> bool:
    """Whether an outcome is that of a call which raised."""
    return isinstance(step, dict) and "raised" in step


def breaks_off(stage: Stage) -> Seen:
    """A transfer breaks off in its middle; then a request comes."""
    return {
        "before": stage.tokens(),
        "checksums before": stage.checksums(),
        "start": stage.start(),
        "send": stage.send(fail_after=NUM_TENSORS),
        "checksums": stage.checksums(),
        "after": stage.tokens(),
    }


def finished_all_the_same(stage: Stage) -> Seen:
    """A transfer breaks off; a trainer that does not mind starts and finishes again."""
    return {
        "before": stage.tokens(),
        "start": stage.start(),
        "send": stage.send(fail_after=NUM_TENSORS),
        "start again": stage.start(),
        "finish": stage.finish("mixture"),
        "label": stage.label(),
        "after": stage.tokens(),
    }


def sent_again(stage: Stage) -> Seen:
    """A transfer breaks off; the trainer sends all of it again."""
    return {
        "before": stage.tokens(),
        "start": stage.start(),
        "send": stage.send(fail_after=NUM_TENSORS_OF_LAYERS),
        "start again": stage.start(),
        "send again": stage.send(),
        "finish": stage.finish("whole"),
        "after": stage.tokens(),
    }


def truncated(stage: Stage) -> Seen:
    """A trainer leaves a tensor out."""
    return {
        "before": stage.tokens(),
        "start": stage.start(),
        "send": stage.send(skip=[LEFT_OUT]),
        "finish": stage.finish("truncated"),
        "label": stage.label(),
        "after": stage.tokens(),
    }


def stale_prefix(stage: Stage) -> Seen:
    """A text is asked for, the weights change, and it is asked for again."""

    def cached() -> int:
        sampling = SamplingParams(temperature=0, max_tokens=2)
        (output,) = stage.llm.generate([TEXT], sampling, use_tqdm=False)
        return int(output.num_cached_tokens)

    stage.llm.reset_prefix_cache()
    return {
        "first": cached(),
        "second": cached(),
        "update": [stage.start(), stage.send(), stage.finish("new")],
        "under the new weights": outcome(cached),
    }


def checked(stage: Stage) -> Seen:
    """All weights change; what is there to tell that they did, and to what?"""
    return {
        "before": stage.checksums(),
        "update": [stage.start(), stage.send(), stage.finish("new")],
        "after": stage.checksums(),
        "digest": stage.digest(),
    }


def torn_ranks(stage: Stage) -> Seen:
    """One of two ranks fails; the trainer starts and finishes until nobody objects."""
    seen = {
        "before": stage.tokens(),
        "start": stage.start(),
        "send": stage.send(fail_after=NUM_TENSORS, fail_rank=0),
        "start again": stage.start(),
        "finish": stage.finish("torn"),
        "finish again": stage.finish("torn"),
        "label": stage.label(),
        "after": stage.tokens(),
    }
    stage.tidy()
    return seen | {
        "update": [stage.start(), stage.send(), stage.finish("new")],
        "new": stage.tokens(),
    }


def asleep(stage: Stage) -> Seen:
    """An engine's memory is given back; then a trainer comes."""
    seen = {"before": stage.tokens(), "sleep": outcome(lambda: stage.llm.sleep(1))}
    tell({"asleep": seen})  # it may not survive the rest
    seen |= {
        "start": stage.start(),
        "send": stage.send(),
        "finish": stage.finish("new"),
    }
    tell({"asleep": seen})
    return seen | {"wake": outcome(stage.llm.wake_up), "after": stage.tokens()}


PLAYS: dict[str, Callable[[Stage], Seen]] = {
    play.__name__: play
    for play in (
        breaks_off,
        finished_all_the_same,
        sent_again,
        truncated,
        stale_prefix,
        checked,
        torn_ranks,
        asleep,
    )
}
CHAINS = (
    ("stale_prefix", "checked", "truncated", "breaks_off"),
    ("finished_all_the_same",),
    ("sent_again",),
    ("torn_ranks",),
    ("asleep",),
)
"""What one engine of vLLM as it is lives through: it does not survive the last."""
TWO_RANKS = "torn_ranks"
ASLEEP = "asleep"
"""On a GPU: the CPU build ignores sleep."""


def options(*names: str) -> dict[str, Any]:
    """Of the engine for those plays, beside those of every `LLM` of the tests."""
    from vllm.config.weight_transfer import WeightTransferConfig

    return {
        "dtype": "float32",
        "weight_transfer_config": WeightTransferConfig(backend="other"),
        "worker_extension_cls": f"{tests.support.engines.transport.__name__}.Extension",
        "enable_sleep_mode": ASLEEP in names,
    }


def main(old: str, new: str, *names: str) -> None:
    from vllm import LLM

    num_ranks = 2 if TWO_RANKS in names else 1
    llm = LLM(old, tensor_parallel_size=num_ranks, **OPTIONS, **options(*names))
    stage = Stage(llm, old, new)
    seen = {}
    for name in names:
        seen[name] = PLAYS[name](stage)
        if name != ASLEEP:
            stage.tidy()
    tell(seen)
    with suppress(Exception):
        llm.llm_engine.engine_core.shutdown()
    # An engine that was broken may never end by itself.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    is_two = TWO_RANKS in sys.argv[3:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if is_two else "0"
    if is_two:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    assert all(Path(folder).is_dir() for folder in sys.argv[1:3])
    main(*sys.argv[1:])
