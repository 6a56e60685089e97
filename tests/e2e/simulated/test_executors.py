"""Executors: with whom all ranks change between two steps, and who is refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import (
    ExecutorWithExternalLauncher,
    UniProcExecutor,
)

from tests.support.engines.bare_core import Streams, add, prompt
from tests.support.simulated.core import (
    Loop,
    assert_told_truly,
    publish_weights,
    simulated_core,
    stage_weights,
)
from tests.support.simulated.graph import Graph
from tests.support.simulated.load import LABELS, code, started
from tests.support.simulated.worker import SimulatedExecutor
from vllm.inflight.engine.executors import kind_of
from vllm.inflight.errors import ConfigError
from vllm.inflight.upstream import RayDistributedExecutor

pytestmark = pytest.mark.engine

GRAPH = {"executor": Graph, "pipeline_parallel_size": 2}


@pytest.fixture
def core(make: Callable[..., EngineCore]) -> EngineCore:
    core = make(**GRAPH)
    core.model_executor.num_overtaken.clear()
    return core


def in_flight(core: EngineCore) -> Streams:
    """A core with a step in flight that has not run."""
    streams = started(core)
    assert core.batch_queue and core.model_executor.submitted
    return streams


def test_no_step_is_overtaken_by_a_commit_or_a_rollback(core: EngineCore) -> None:
    streams = in_flight(core)
    publish_weights(core, 1, "one")
    streams.step(3)
    assert core.model_executor.submitted
    answer = core.inflight("rollback", {})
    assert answer["ok"]["weight_version"] == "default"
    assert core.model_executor.num_overtaken == [0, 0]
    assert_told_truly(core, streams.run(), LABELS.get)


def test_scheduled_batches_stay_unchanged_while_a_commit_waits_for_their_steps(
    core: EngineCore,
) -> None:
    streams = in_flight(core)
    before = [scheduled for _, scheduled, _ in core.batch_queue]
    told = sum(map(len, streams.tokens.values()))
    publish_weights(core, 1, "one")
    assert [scheduled for _, scheduled, _ in core.batch_queue] == before
    assert sum(map(len, streams.step().tokens.values())) > told


def test_no_step_is_overtaken_by_an_adapter(core: EngineCore) -> None:
    in_flight(core)
    assert core.add_lora(LoRARequest("x", 1, "x"))
    assert set(core.model_executor.num_overtaken) == {0}


def test_no_commit_follows_a_step_that_fails(model: Path) -> None:
    core = simulated_core(model, Graph, kind=Loop, pipeline_parallel_size=2)
    in_flight(core)
    stage_weights(core, 1)
    core.model_executor.is_to_fail = True
    answer = core.inflight("commit", {})
    assert code(answer) == "engine_fault"
    assert "an actor has died" in answer["error"]["message"]
    assert core.model_executor.num_overtaken == []
    with pytest.raises(RuntimeError, match="an actor has died"):
        core.step_fn()
        core.step_fn()
    core.shutdown()


Strange: Any = type("Strange", (Executor,), dict(vars(SimulatedExecutor)))
"""Of no kind that is known."""


def test_an_unknown_executor_serves_and_is_rejected_by_name(model: Path) -> None:
    core = simulated_core(model, Strange, kind=Loop)
    assert core.model_executor.board is None, "it was asked for something"
    calls = {"start": {"transport": "groups"}, "join_group": {"init_info": {}}}
    for method, body in calls.items():
        answer = core.inflight(method, body)
        assert code(answer) == "staging_unavailable"
        assert "executor Strange" in answer["error"]["message"]
    add(core, "r", prompt(9))
    assert set(Streams(core).run().stamps["r"]) == {"default"}
    core.shutdown()


def test_an_unsupported_engine_with_required_staging_does_not_start(
    model: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"--inflight-staging host .*Strange"):
        simulated_core(model, Strange, inflight={"staging": "host"})


ONE, TWO = 1, 2


@pytest.mark.parametrize(
    ("base", "num_ranks", "runner", "is_ordered", "refusal"),
    [
        (UniProcExecutor, ONE, "generate", True, None),
        (MultiprocExecutor, TWO, "generate", True, None),
        (RayDistributedExecutor, TWO, "generate", False, None),
        (RayDistributedExecutor, ONE, "pooling", False, None),
        (RayDistributedExecutor, TWO, "pooling", False, "pooling models read weights"),
        (ExecutorWithExternalLauncher, ONE, "generate", True, None),
        (
            ExecutorWithExternalLauncher,
            TWO,
            "generate",
            True,
            "runs 2 ranks as separate engines",
        ),
        (Executor, ONE, "generate", True, "executor Mine is unknown"),
    ],
)
def test_a_derived_executor_is_treated_as_its_base_class(
    base: Any, num_ranks: int, runner: str, is_ordered: bool, refusal: str | None
) -> None:
    is_rays = {"uses_ray": True} if base is RayDistributedExecutor else {}
    derived: Any = type("Mine", (base,), is_rays)
    derived.__abstractmethods__ = frozenset()
    executor = object.__new__(derived)
    executor.parallel_config = SimpleNamespace(world_size=num_ranks)
    executor.model_config = SimpleNamespace(runner_type=runner)
    executor.driver_worker = None
    kind = kind_of(executor)
    assert kind.is_ordered is is_ordered
    assert (refusal is None) == (kind.refusal is None)
    assert (refusal or "") in (kind.refusal or "")
