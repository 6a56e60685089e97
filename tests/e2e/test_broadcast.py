"""Backend `inflight_gloo` in a real engine, driven by upstream's trainer interface."""

import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.engines.probe import greedy, outputs_during
from tests.support.engines.sync_client import gloo_trainer
from tests.support.models.checkpoint_source import CheckpointSource
from tests.support.waiting import until
from vllm.inflight.errors import InflightError, WeightsMismatch

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    return start(
        old, weight_transfer_config=WeightTransferConfig(backend="inflight_gloo")
    )


@pytest.fixture
def source(new: Path) -> CheckpointSource:
    return CheckpointSource(new)


@pytest.fixture
def trainer(llm: Any, source: CheckpointSource) -> Iterator[Any]:
    trainer = gloo_trainer(llm, source)
    yield trainer
    trainer.shutdown()
    llm.shutdown_weight_transfer_engine()


def test_weights_that_a_trainer_sends_are_served(
    llm: Any, trainer: Any, fresh: list[list[int]]
) -> None:
    trainer.send_weights()
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) != fresh
    trainer.send_weights()
    assert greedy(llm) == fresh
    last = llm.weight_update_status()["outcomes"][0]
    seconds = last["seconds"]
    assert 0 <= seconds["wire"] < seconds["staging"]
    assert 0 < seconds["cpu"] <= seconds["staging"]


def test_a_slow_trainer_shows_in_the_seconds_of_the_wire(
    llm: Any, trainer: Any, source: CheckpointSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(self: CheckpointSource) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(self.tensors.items()):
            if index == len(self.tensors) // 2:
                time.sleep(1)
            yield pair

    monkeypatch.setattr(CheckpointSource, "read_tensors", slowly)
    trainer.send_weights()
    seconds = llm.weight_update_status()["outcomes"][0]["seconds"]
    assert 0.5 < seconds["wire"] < seconds["staging"]
    assert seconds["cpu"] < seconds["staging"] - 0.5, "to wait is no work"


def test_tokens_flow_while_a_trainer_sends(
    llm: Any, trainer: Any, fresh: list[list[int]]
) -> None:
    def send() -> None:
        for _ in range(5):
            trainer.send_weights()

    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    outputs = outputs_during(send, llm, 4, repeat(params))
    assert {len(o.outputs[0].token_ids) for o in outputs} == {600}
    assert max(len(o.outputs[0].weight_versions) for o in outputs) > 1
    assert greedy(llm) == fresh


def test_a_group_stays_usable_after_the_model_rejects_an_update(
    llm: Any, trainer: Any, source: CheckpointSource, fresh: list[list[int]]
) -> None:
    before = greedy(llm)
    norm = source.tensors.pop("model.norm.weight")
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight"):
        trainer.send_weights()
    assert greedy(llm) == before
    source.tensors["model.norm.weight"] = norm
    trainer.send_weights()
    assert greedy(llm) == fresh


def test_a_trainer_that_stops_sending_lets_serving_go_on(
    llm: Any, trainer: Any, source: CheckpointSource, fresh: list[list[int]]
) -> None:
    before = greedy(llm)

    class Stopped(Exception):
        pass

    class Half(CheckpointSource):
        def __init__(self) -> None:
            self.tensors = source.tensors

        def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(self.tensors.items())[:6]
            raise Stopped

    trainer.source = Half()
    with pytest.raises((Stopped, InflightError)):
        trainer.send_weights()
    assert greedy(llm) == before
    until(lambda: llm.weight_update_status()["active"] is None)
    trainer.source = source
    trainer.send_weights()
    assert greedy(llm) == fresh
