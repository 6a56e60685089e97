"""What the tests ask of an engine: prompts, greedy tokens, a version sent."""

from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.support.waiting import until
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import StartUpdate
from vllm.inflight.errors import InflightError, WeightsMismatch
from vllm.inflight.transport.waiting import in_background

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NUM_PROMPTS = 16
"""That are asked at once: an engine of the tests takes them in one batch."""


def prompts(count: int) -> list[dict[str, Any]]:
    """Different prompts of different lengths, as token ids."""
    return [
        {"prompt_token_ids": [(7 * i + 3 * j) % 250 for j in range(20 + i)]}
        for i in range(count)
    ]


def greedy(llm: Any) -> list[list[int]]:
    """What the weights served now make of `NUM_PROMPTS`, in twelve steps."""
    outputs = llm.generate(prompts(NUM_PROMPTS), GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def checksums(llm: Any) -> list[dict[str, str]]:
    """The digest of every parameter that is served, of each rank."""
    replies = llm.collective_rpc("inflight_read", args=("checksums", []))
    return [reply["ok"]["checksums"] for reply in replies]


def begin_from_files(llm: Any, **opening: Any) -> None:
    """Begin an update whose pieces are files, whatever transport was configured."""
    run_sync(control_of(llm).start(StartUpdate(transport="local", **opening)))


def outcome(llm: Any, path: str, *, alone: bool = False, **faults: Any) -> Any:
    """What became of an update by the transport "other": an error, if one did.

    Args:
        llm: the engine.
        path: of what is sent.
        alone: whether it is the drafter's.
        **faults: of that transport.

    """
    llm.start_draft_weight_update() if alone else llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"path": path, **faults}})
        llm.finish_weight_update("new")
    except WeightsMismatch as error:
        return error.tensors
    except InflightError as error:
        return error.code
    return "committed"


def outputs_during(
    work: Callable[[], Any], llm: Any, count: int, sampling: Iterator[SamplingParams]
) -> list[Any]:
    """Keep `count` requests running until `work`, in a thread, is done.

    They are admitted one at a step, and each that ends is replaced in the next one. So
    they end apart, and `work` finds running ones whenever it acts. It begins when the
    first one has. Returns all outputs, as they were asked for; raises what `work`
    raised.
    """
    engine = llm.llm_engine

    def worked() -> None:
        until(engine.output_processor.has_unfinished_requests)
        work()

    working = in_background(worked)
    asked = prompts(count)
    outputs: dict[int, Any] = {}
    free, number = list(range(count)), 0
    running: dict[str, tuple[int, int]] = {}
    while running or not working.done():
        if free and not working.done():
            prompt, name = free.pop(0), f"during-{number}"
            engine.add_request(name, asked[prompt], next(sampling))
            running[name] = number, prompt
            number += 1
        for output in engine.step():
            if output.finished:
                at, prompt = running.pop(output.request_id)
                outputs[at] = output
                free.append(prompt)
    working.result()
    return [outputs[at] for at in sorted(outputs)]


def spread(outputs: list[Any], count: int) -> list[Any]:
    """At most `count` of them, from the first one to the last, evenly apart."""
    return outputs[:: -(-len(outputs) // count)]


def flips_under_load(
    llm: Any, paths: tuple[Path, Path], num_flips: int
) -> tuple[list[Any], list[float]]:
    """Commit the two in turn while requests of 200 tokens run.

    Returns the outputs and how long each flip took, in seconds.
    """
    seconds: list[float] = []

    def commit_all() -> None:
        for number in range(num_flips):
            path = paths[number % 2]
            reply = llm.update_weights_from_disk(str(path), f"v{number}")
            seconds.append(reply["seconds"]["flip"])

    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    outputs = outputs_during(commit_all, llm, 8, repeat(sampling))
    assert {len(o.outputs[0].token_ids) for o in outputs} == {200}
    assert any(len(o.outputs[0].weight_versions) > 1 for o in outputs)
    return outputs, seconds


def commits_and_rollbacks(
    llm: Any, old: Path, new: Path, fresh: list[list[int]], rounds: int = 3
) -> None:
    """Commit, roll back and commit again; each serves what a fresh engine would.

    `old` is served at the beginning and in the end; `fresh` is what `new` makes.
    """
    before = greedy(llm)
    assert before != fresh
    for _ in range(rounds):
        llm.update_weights_from_disk(str(new), "new")
        assert greedy(llm) == fresh
        llm.rollback_weights()
        assert greedy(llm) == before
        llm.update_weights_from_disk(str(old), "old")
        assert greedy(llm) == before


def state(llm: Any) -> tuple[list[list[int]], str]:
    """Tokens and label: all that a failed update must leave alone."""
    return greedy(llm), llm.get_weight_version()


def send(llm: Any, path: Path, **faults: Any) -> None:
    """Have the transport "other" receive a checkpoint, with faults if any."""
    llm.update_weights({"update_info": {"path": str(path), **faults}})
