"""Sequences of calls that harm vLLM as it is, told step by step.

As a script: python -m tests.faults.scenarios OLD NEW NAME...; plays each of the named
scenarios on one engine and prints what was seen as JSON. With VLLM_PLUGINS="" in the
environment the engine is vLLM as it is, and a scenario may be its last.

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

import tests.engine.transport  # (registers the transport "other")
from tests.engine.probe import greedy
from tests.engine.script import OPTIONS, tell

NUM_TENSORS = 8
"""After which a transfer breaks off: in the middle of a layer."""
TEXT = {"prompt_token_ids": [(7 * i) % 250 for i in range(100)]}


class Play:
    """One engine, and what is asked of it.

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


def breaks_off(play: Play) -> dict[str, Any]:
    """A transfer breaks off in its middle; then a request comes."""
    return {
        "before": play.tokens(),
        "start": play.start(),
        "send": play.send(fail_after=NUM_TENSORS),
        "after": play.tokens(),
    }


def without_a_pause(play: Play) -> dict[str, Any]:
    """An update is begun while nothing is paused; then a request comes."""
    return {
        "before": play.tokens(),
        "start": play.start(),
        "after": play.tokens(),
    }


def finished_all_the_same(play: Play) -> dict[str, Any]:
    """A transfer breaks off; a trainer that does not mind starts and finishes again."""
    return {
        "before": play.tokens(),
        "start": play.start(),
        "send": play.send(fail_after=NUM_TENSORS),
        "start again": play.start(),
        "finish": play.finish("mixture"),
        "label": play.label(),
        "after": play.tokens(),
    }


def truncated(play: Play) -> dict[str, Any]:
    """A trainer leaves a layer out."""
    return {
        "before": play.tokens(),
        "start": play.start(),
        "send": play.send(skip=["model.layers.1.mlp.down_proj.weight"]),
        "finish": play.finish("truncated"),
        "label": play.label(),
        "after": play.tokens(),
    }


def again_and_again(play: Play) -> dict[str, Any]:
    """Three updates in a row."""
    seen: dict[str, Any] = {}
    for number in range(3):
        calls = [play.start(), play.send(), play.finish(f"v{number}")]
        seen[f"update {number}"] = [call for call in calls if call is not None]
    return seen | {"after": play.tokens()}


def stale_prefix(play: Play) -> dict[str, Any]:
    """A text is asked for, the weights change, and it is asked for again."""

    def cached() -> int:
        sampling = SamplingParams(temperature=0, max_tokens=2)
        (output,) = play.llm.generate([TEXT], sampling, use_tqdm=False)
        return int(output.num_cached_tokens)

    play.llm.reset_prefix_cache()
    return {
        "first": cached(),
        "second": cached(),
        "update": [play.start(), play.send(), play.finish("new")],
        "under the new weights": outcome(cached),
    }


def out_of_order(play: Play) -> dict[str, Any]:
    """Phases that come twice, or without the one before."""
    return {
        "send first": play.send(),
        "finish first": play.finish("nothing"),
        "start": play.start(),
        "start twice": play.start(),
    }


def renamed(play: Play) -> dict[str, Any]:
    """Another label is given to what is served; is anything to be seen of it?"""
    before = outcome(lambda: play.llm.weight_info())
    llm: Any = play.llm
    rename = getattr(llm, "update_weight_version", None) or llm.set_weight_version
    return {
        "before": before,
        "rename": outcome(lambda: rename("another")),
        "label": play.label(),
        "after": outcome(lambda: play.llm.weight_info()),
    }


def torn_ranks(play: Play) -> dict[str, Any]:
    """One of two ranks fails; the trainer starts and finishes again."""
    return {
        "before": play.tokens(),
        "start": play.start(),
        "send": play.send(fail_after=NUM_TENSORS, fail_rank=0),
        "start again": play.start(),
        "finish": play.finish("torn"),
        "label": play.label(),
        "after": play.tokens(),
    }


SCENARIOS: dict[str, Callable[[Play], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        breaks_off,
        without_a_pause,
        finished_all_the_same,
        truncated,
        again_and_again,
        stale_prefix,
        out_of_order,
        renamed,
        torn_ranks,
    )
}
NEED_TWO_RANKS = ("torn_ranks",)


def main(old: str, new: str, *names: str) -> None:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    num_ranks = 2 if set(names) & set(NEED_TWO_RANKS) else 1
    llm = LLM(
        old,
        tensor_parallel_size=num_ranks,
        dtype="float32",
        weight_transfer_config=WeightTransferConfig(backend="other"),
        worker_extension_cls=f"{tests.engine.transport.__name__}.Extension",
        **OPTIONS,
    )
    play = Play(llm, old, new)
    seen = {}
    for name in names:
        seen[name] = SCENARIOS[name](play)
        play.tidy()
    tell(seen)
    # An engine that died may never end by itself.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    is_two = set(sys.argv[3:]) & set(NEED_TWO_RANKS)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if is_two else "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if is_two else "0"
    assert all(Path(folder).is_dir() for folder in sys.argv[1:3])
    main(*sys.argv[1:])
