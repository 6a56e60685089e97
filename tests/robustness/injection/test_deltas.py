"""Faults at the points that only deltas have: find, decode, write, prove, swap, undo.

Something is raised there, once. What was served is served afterwards, and the same
delta works when it comes again. Other points are those of any update, which the matrix
has. A fault within a swap is left to tests/e2e/test_delta_staging_tearing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_delta_staging import FOR_ONE, delta_engine, versions_for_one
from tests.e2e.test_deltas import Sent, step, tokens
from tests.support.engines.unpacked import unpacked
from vllm.inflight.errors import InflightError
from vllm.inflight.trainer import Publisher
from vllm.inflight.trainer.deltas.delta import DeltaSearch
from vllm.inflight.trainer.deltas.published import PublishedVersion
from vllm.inflight.worker.delta import whole_tensors
from vllm.inflight.worker.delta.whole_tensors import DeltaTensors
from vllm.inflight.worker.delta.writer import DeltaWriter
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.swap import Swap
from vllm.inflight.worker.staging.worker import StagingWorker

pytestmark = pytest.mark.engine

SECOND_SET, LOG = "second set", "delta staging"
POINTS: dict[str, dict[str, tuple[Any, str]]] = {
    SECOND_SET: {
        "decode": (whole_tensors, "decode"),
        "write": (whole_tensors, "apply"),
        "last tensor": (DeltaTensors, "rest"),
    },
    LOG: {
        "begin": (DeltaWriter, "begin"),
        "decode": (DeltaWriter, "_write"),
        "write": (ChangeLog, "add"),
        "room": (ChangeLog, "require_room"),
        "prove": (DeltaWriter, "problems"),
        "expect": (ChangeLog, "expected"),
        "swap": (Swap, "__call__"),
    },
}
"""Where a delta passes, by the staging of the engine."""
MOVES = {
    "find room": (ChangeLog, "_moves"),
    "copy": (ChangeLog, "_copy"),
    "make the swap": (Swap, "of"),
    "moved": (StagingWorker, "move_way_back"),
}
"""Where a delta passes that has no room beside the weights with the way back there."""
FAULTS = (RuntimeError, torch.OutOfMemoryError, MemoryError)


PAIRS = [(staging, point) for staging, points in POINTS.items() for point in points]
of_staging = pytest.mark.parametrize("staging", POINTS, indirect=True)


@pytest.fixture(scope="module")
def staging(request: pytest.FixtureRequest) -> Iterator[str]:
    """The staging of the module's engine."""
    with unpacked() if request.param == LOG else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def llm(staging: str, start: Callable[..., Any], old: Path) -> Any:
    options: dict[str, Any] = {}
    if staging == LOG:
        log = {"staging": "delta", "delta_gib": 0.01}
        options["additional_config"] = {"inflight": log}
    backend = WeightTransferConfig(backend="local")
    return start(old, weight_transfer_config=backend, **options)


@pytest.fixture
def weights(old: Path) -> dict[str, torch.Tensor]:
    return load_file(old / "model.safetensors")


def served(llm: Any) -> tuple[str, str, list[int]]:
    info = llm.weight_info()
    return info["weight_version"], info["digest"], tokens(llm)


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`injected(owner, name, fault)`: the next call there raises; who was hit."""

    def at(owner: Any, name: str, fault: type[Exception]) -> list[str]:
        original, hit = getattr(owner, name), []

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not hit:
                hit.append(name)
                raise fault(f"injected at {name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)
        return hit

    return at


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("staging", "point"), PAIRS, indirect=["staging"])
def test_a_fault_changes_nothing_and_the_same_delta_works_afterwards(
    llm: Any,
    staging: str,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    injected: Callable[..., list[str]],
    point: str,
    fault: type[Exception],
) -> None:
    with Publisher(llm, weights) as to:
        to.publish("base")
    before = served(llm)
    sent = Sent(llm, weights, tmp_path)
    hit = injected(*POINTS[staging][point], fault)
    with pytest.raises(InflightError):
        sent.send(sent.pairs())
    assert hit, "the point was not reached"
    assert served(llm) == before
    assert llm.weight_update_status()["active"] is None
    sent.send(sent.pairs())
    after = served(llm)
    assert after[1:] != before[1:]
    llm.rollback_weights()
    assert served(llm) == before
    llm.rollback_weights()
    assert served(llm) == after


@pytest.fixture(scope="module")
def tight(staging: str, start: Callable[..., Any], old: Path) -> Any:
    """An engine whose log has no room beside the weights for two updates."""
    backend = WeightTransferConfig(backend="local")
    return delta_engine(start, old, inflight=FOR_ONE, weight_transfer_config=backend)


@pytest.mark.parametrize("staging", [LOG], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("point", MOVES)
def test_a_fault_as_the_way_back_moves_keeps_it_and_the_same_version_works_afterwards(
    tight: Any,
    staging: str,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    injected: Callable[..., list[str]],
    point: str,
    fault: type[Exception],
) -> None:
    file = tmp_path / "model.safetensors"
    seen = []
    for number, version in enumerate([weights, *versions_for_one(weights, 2)]):
        save_file(version, file)
        if number == 2:
            hit = injected(*MOVES[point], fault)
            with pytest.raises(InflightError):
                tight.update_weights_from_disk(str(file), "in vain")
            assert hit, "the point was not reached"
            for expected in seen:
                tight.rollback_weights()
                assert served(tight) == expected
        tight.update_weights_from_disk(str(file), str(number))
        seen.append(served(tight))
    assert len({digest for _, digest, _ in seen}) == 3
    tight.rollback_weights()
    assert served(tight) == seen[1]
    tight.rollback_weights()
    assert served(tight) == seen[2]


@of_staging
@pytest.mark.parametrize("point", ["find", "advance"])
def test_after_a_fault_in_the_trainer_the_next_version_is_whole(
    llm: Any,
    staging: str,
    weights: dict[str, torch.Tensor],
    injected: Callable[..., list[str]],
    point: str,
) -> None:
    with Publisher(llm, weights) as to:
        to.publish("base")
        before = served(llm)
        step(weights, 1)
        if point == "find":
            hit = injected(DeltaSearch, "_compare", MemoryError)
            with pytest.raises(MemoryError):
                to.publish("delta")
            assert served(llm) == before
        else:
            # The kept version is advanced when the engine serves the new one.
            hit = injected(PublishedVersion, "advance", MemoryError)
            assert to.publish("delta").is_delta
            assert served(llm) != before
        assert hit
        step(weights, 2)
        assert not to.publish("whole").is_delta
        step(weights, 3)
        assert to.publish("delta again").is_delta


@pytest.mark.parametrize("staging", [LOG], indirect=True)
def test_a_rollback_that_fails_leaves_the_new_version(
    llm: Any,
    staging: str,
    weights: dict[str, torch.Tensor],
    injected: Callable[..., list[str]],
) -> None:
    with Publisher(llm, weights) as to:
        to.publish("base")
        before = served(llm)
        step(weights, 1)
        assert to.publish("delta").is_delta
        after = served(llm)
        assert injected(Swap, "__call__", RuntimeError) == []
        with pytest.raises(InflightError):
            to.rollback()
        assert served(llm) == after
        to.rollback()
        assert served(llm) == before
