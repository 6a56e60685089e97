"""Tearing with delta staging: every step is of one version, though it has one set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_delta_staging import delta_engine, without_packing  # noqa: F401
from tests.e2e.test_tearing import mismatches, stream_under_commits
from tests.support.engines.reference import Reference
from vllm.inflight.worker.shadow.swap import Swap

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], versions: dict[str, Path]) -> Any:
    inflight = {"staging": "delta", "delta_gib": 0.05, "stage_share": 1}
    return delta_engine(start, versions["a"], dtype="float32", inflight=inflight)


def commit_under_load(
    llm: Any, versions: dict[str, Path], reference: Reference, num: int
) -> None:
    outputs = stream_under_commits(llm, versions, num)
    spanning = sum(len(o.outputs[0].weight_versions) > 1 for o in outputs)
    assert spanning > len(outputs) // 2, "the commits did not come under load"
    assert mismatches(outputs, reference, "a") == []
    llm.update_weights_from_disk(str(versions["a"]), "a")


def test_every_step_of_40_commits_under_load_is_of_one_version(
    llm: Any, versions: dict[str, Path], reference: Reference
) -> None:
    commit_under_load(llm, versions, reference, 40)


@pytest.mark.slow
def test_every_step_of_400_commits_under_load_is_of_one_version(
    llm: Any, versions: dict[str, Path], reference: Reference
) -> None:
    commit_under_load(llm, versions, reference, 400)


def test_a_torn_swap_is_found_by_the_tests_above(
    llm: Any,
    versions: dict[str, Path],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Swap.__call__

    def half(self: Swap) -> float:
        tensors = list(self._live.values())
        part = tensors[: len(tensors) // 2]
        kept = [tensor.data.clone() for tensor in part]
        seconds = whole(self)
        with torch.no_grad():
            for tensor, old in zip(part, kept, strict=True):
                tensor.data.copy_(old)
        return seconds

    with monkeypatch.context() as patched:
        patched.setattr(Swap, "__call__", half)
        outputs = stream_under_commits(llm, versions, 1)
    assert len(mismatches(outputs, reference, "a")) > 10
    # What is served belongs to no version, and is compared element by element.
    llm.update_weights_from_disk(str(versions["c"]), "c")
    assert llm.verify_weights()["result"] == "equal"
