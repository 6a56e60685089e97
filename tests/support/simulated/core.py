"""Cores with the simulated worker: how the tests start one, and empty it again."""

import queue
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState

from tests.support.engines.bare_core import Streams, call
from tests.support.simulated.worker import BLOCK, SimulatedExecutor
from vllm.inflight.engine.scheduling.aborted_sessions import AbortedSessions

NUM_BLOCKS = 48


class Loop(EngineCoreProc):
    """A core as it runs in a process of its own, but turned by hand, round by round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.input_queue = queue.Queue()
        self.output_queue = queue.Queue()
        self.engine_index = 0
        self.engines_running = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.process_input_queue_block = False
        self.reject_new_requests = False
        EngineCore.__init__(self, *args, **kwargs)

    def round(self) -> list[Any]:
        """One round of the busy loop; what it put out."""
        self._process_input_queue()
        if self.has_work():
            self._process_engine_step()
        groups = []
        while not self.output_queue.empty():
            groups.append(self.output_queue.get()[1])
        return groups

    def shutdown(self) -> None:
        EngineCore.shutdown(self)


def simulated_core(
    model: Path,
    executor: type[SimulatedExecutor] = SimulatedExecutor,
    *,
    inflight: dict[str, Any] | None = None,
    is_async: bool = False,
    kind: type[EngineCore] = EngineCore,
    num_blocks: int = NUM_BLOCKS,
    **options: Any,
) -> EngineCore:
    """A core with the simulated worker; `is_async` has two steps in flight."""
    defaults: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "block_size": BLOCK,
        "num_gpu_blocks_override": num_blocks,
        "enforce_eager": True,
        "additional_config": {"inflight": inflight or {}},
        # For one of Ray's, vLLM would ask for Ray itself.
        "distributed_executor_backend": (
            SimulatedExecutor if executor.uses_ray else executor
        ),
    }
    if executor.drafts:
        defaults["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": executor.drafts,
            "prompt_lookup_max": 2,
        }
    config = EngineArgs(model=str(model), **(defaults | options)).create_engine_config()
    # The CPU platform turns it off; no device is at work here.
    config.scheduler_config.async_scheduling = is_async
    return kind(config, executor, log_stats=False)


def emptied(core: EngineCore) -> EngineCore:
    """The core as it was at its start, on weights 0, but for its epoch."""
    if call(core, "status")["active"] is not None:
        call(core, "abort")
    core.scheduler.connector = None
    streams = Streams(core).step()
    call(core, "resume")
    core.abort_requests(list(core.scheduler.requests))
    while core.scheduler.has_requests() or core.batch_queue:
        streams.step()
    worker = core.model_executor
    if core.vllm_inflight.version.label != "default":
        publish_weights(core, 0, "default")
    call(core, "start", transport="local")
    call(core, "receive", update_info={"weights": 0})  # and so there is no way back
    call(core, "abort")
    assert core.reset_prefix_cache()
    core.scheduler.vllm_inflight.aborted = (
        AbortedSessions()
    )  # the next one's session has its name
    worker.sampled.clear()
    worker.rows.clear()
    return core


def publish_weights(core: EngineCore, weights: int, label: str, **commit: Any) -> Any:
    """Stage the simulated weights and commit them."""
    stage_weights(core, weights)
    return call(core, "commit", weight_version=label, **commit)


def stage_weights(core: EngineCore, weights: int) -> None:
    """Bring the simulated weights to the vote, and no further."""
    call(core, "start", transport="local")
    call(core, "receive", update_info={"weights": weights})
    call(core, "prepare")


def assert_told_truly(core: EngineCore, streams: Streams, label_of: Any) -> None:
    """Every token came out once, in order, with the version that sampled it."""
    for name, made in core.model_executor.sampled.items():
        told = streams.tokens.get(name, [])
        assert [s.token for s in made][: len(told)] == told, name
        labels = [label_of(s.weights) for s in made][: len(told)]
        assert streams.stamps.get(name, []) == labels, name
