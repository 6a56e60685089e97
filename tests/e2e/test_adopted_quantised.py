"""An adopted method on a quantised engine: what it may read, and what it may write.

A layer has its content when it is processed, which may be long after its weights have
come: kernels also need its scales. So a method reads nothing of the version before, and
writes no parameter of a quantised layer itself, as prime-rl's quantised transfer does.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adopted_direct_writes import (  # noqa: F401 (a fixture)
    EXTENSION,
    build,
    write,
)
from tests.e2e.test_adoption import served, tensors_of
from tests.support.engines.bare_core import answers, publish
from tests.support.frameworks.core import extended_core
from tests.support.frameworks.direct import ATTENTION_OUT, TENSORS
from vllm.inflight.engine.controller import Controller
from vllm.inflight.errors import InflightError

VERL = "tests.support.frameworks.buckets.Verl"

pytestmark = pytest.mark.engine


def test_a_layer_is_not_read_before_it_is_processed(
    build: None,  # noqa: F811
    checkpoint: Callable[..., Path],
) -> None:
    old, new = (
        checkpoint(seed, "fp8-channel", family="qwen2", hidden=256) for seed in (0, 1)
    )
    TENSORS["checkpoint"], TENSORS["kernel"] = tensors_of(new), {}
    with extended_core(old, EXTENSION) as core:
        before, said = served(core), answers(core, "before")
        with pytest.raises(InflightError, match=f"reads {ATTENTION_OUT}"):
            write(core, "reads before scales")
        assert (served(core), answers(core, "after")) == (before, said)
    TENSORS.clear()


def test_a_write_in_kernel_format_into_a_quantised_layer_is_rejected_by_name(
    build: None,  # noqa: F811
    checkpoint: Callable[..., Path],
) -> None:
    """All other parameters are written before it."""
    old, new = (
        checkpoint(seed, "fp8-channel", family="qwen2", hidden=256) for seed in (0, 1)
    )
    with extended_core(old, EXTENSION) as core:
        publish(core, new, "new")
        model = core.model_executor.driver_worker.worker.model_runner.model
        kernel = {n: p.detach().clone() for n, p in model.named_parameters()}
        wanted = answers(core, "expected")
        publish(core, old, "older")
        publish(core, old, "old")
        in_layers = {n: t for n, t in kernel.items() if "proj" in n}
        TENSORS["checkpoint"] = tensors_of(new)
        TENSORS["kernel"] = {
            n: t for n, t in kernel.items() if n not in in_layers
        } | in_layers
        before, said = served(core), answers(core, "before")
        with pytest.raises(InflightError, match="whose layer is quantised") as raised:
            write(core, "copies")
        assert next(n for n in in_layers if n.endswith("weight")) in str(raised.value)
        assert (served(core), answers(core, "after")) == (before, said)
        publish(core, new, "new again")
        assert answers(core, "at last") == wanted != said
    TENSORS.clear()


def test_load_steps_of_another_release_are_not_executed_on_a_quantised_shadow(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's functions that prepare layers would be executed on the shadow model."""
    monkeypatch.setitem(sys.modules, "verl", None)  # it cannot be imported
    folder = checkpoint(0, "fp8-channel", family="qwen2", hidden=256)

    def obstacles(core: EngineCore) -> list[str | None]:
        adoption = Controller.of(core).adoption
        return [adoption._standing_obstacle(row) for row in adoption.rows]

    with extended_core(folder, VERL) as core:
        (why,) = obstacles(core)
        assert why is not None and "by other functions than verl.utils" in why
    with extended_core(checkpoint(0, family="qwen2"), VERL) as core:
        assert obstacles(core) == [None]
