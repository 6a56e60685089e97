"""An engine core without a front end: how the tests drive one, and read it."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.stamps import Stamps


def call(core: EngineCore, method: str, **body: Any) -> Any:
    """The reply of a control call that is not refused."""
    answer = core.inflight(method, body)
    if isinstance(answer, Future):
        answer = answer.result(timeout=30)
    assert "error" not in answer, answer
    return answer["ok"]


def end_lease(core: EngineCore) -> None:
    """Let the lease of a pause run out now."""
    held = core.vllm_inflight.pauses._lease
    held.take(held.owner, 0.0)


def publish(core: EngineCore, folder: Path, label: str, **commit: Any) -> Any:
    """Stage a checkpoint and commit it."""
    stage(core, folder)
    return call(core, "commit", weight_version=label, **commit)


def stage(core: EngineCore, folder: Path) -> None:
    """Bring a checkpoint to the vote, and no further."""
    call(core, "start", transport="local")
    call(core, "receive", update_info={"path": str(folder)})
    call(core, "prepare")


def request(name: str, prompt: list[int], **params: Any) -> EngineCoreRequest:
    """A request as a front end would send it."""
    sampling = SamplingParams(
        **({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | params)
    )
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def add(core: EngineCore, name: str, prompt: list[int], **params: Any) -> None:
    """Hand a request to the core."""
    core.add_request(*core.preprocess_add_request(request(name, prompt, **params)))


def num_sampled(core: EngineCore, name: str) -> int:
    """Tokens of a request that runs.

    Some may not have come out yet: a pause finishes the steps in flight, and their
    tokens come out of the next step.
    """
    return int(core.scheduler.requests[name].num_output_tokens)


class Streams:
    """What came out of a core: tokens with the stamp of their step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.stamps: dict[str, list[str]] = {}
        self.finished: dict[str, str] = {}
        self.stopped: dict[str, Any] = {}
        """The `stop_reason` of those that have finished."""
        self._read = Stamps()

    def step(self, times: int = 1) -> "Streams":
        for _ in range(times):
            for group in self._groups():
                for output in group.outputs:
                    label = self._read.label(group, output)
                    new = list(output.new_token_ids)
                    self.tokens.setdefault(output.request_id, []).extend(new)
                    self.stamps.setdefault(output.request_id, []).extend(
                        [label] * len(new)
                    )
                    if output.finish_reason is not None:
                        self.finished[output.request_id] = str(output.finish_reason)
                        self.stopped[output.request_id] = output.stop_reason
        return self

    def _groups(self) -> list[Any]:
        """What one step of a core, or one round of a loop, has put out."""
        if hasattr(self.core, "round"):
            return self.core.round()
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        controller = self.core.vllm_inflight
        late, controller.drained_outputs = controller.drained_outputs, []
        last, controller.undelivered_outputs = controller.undelivered_outputs, []
        groups = [g for each in [*late, outputs or {}] for g in each.values()]
        return [*groups, EngineCoreOutputs(outputs=last)]

    def run(self, most: int = 400) -> "Streams":
        for _ in range(most):
            if not self.core.scheduler.has_unfinished_requests():
                return self
            self.step()
        raise AssertionError("requests did not finish")


def prompt(seed: int, length: int = 40) -> list[int]:
    """Token ids that differ from seed to seed."""
    return [(11 * seed + 5 * i) % 250 for i in range(length)]


def ended_soon(streams: Streams, name: str) -> int:
    """Let a request have 20 tokens more, and no others; returns how many it has had.

    For one that was to outlast something of unknown length. It ends in the ordinary
    way, so each of its tokens has to come out.
    """
    request = streams.core.scheduler.requests[name]
    request.max_tokens = min(request.max_tokens, num_sampled(streams.core, name) + 20)
    streams.run()
    return int(request.max_tokens)


def answers(core: EngineCore, name: str) -> list[int]:
    """What the core makes of four prompts: 40 tokens in ten steps."""
    names = [f"{name} {seed}" for seed in range(4)]
    for seed, each in enumerate(names):
        add(core, each, prompt(seed), max_tokens=10)
    tokens = Streams(core).run().tokens
    return [token for each in names for token in tokens[each]]
