"""The destination table is recorded without memory, and proved before it is used."""

from typing import Any

import pytest
import torch

from tests.support.shadow_on_host import (
    HIDDEN,
    Model,
    shadow_of,
    start_checkpoint,
    version,
)
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.shadow import parameters
from vllm.inflight.worker.staging.destination_table import fill_table
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint


def hollow(
    kind: type[torch.nn.Module] = Model, names: dict[str, torch.Tensor] | None = None
) -> Any:
    """A shadow model without memory, of an engine that was started from a version."""
    live = kind(torch.empty)
    live.load_weights(version(0).items())
    with torch.device("meta"):
        second = kind(torch.empty)
    parameters.make_hollow(live, second, torch.device("cpu"))
    shadow = shadow_of(live, second)
    shadow.log = object()
    shadow.plan = Plan(is_replayed=False)
    shadow.start_checkpoint = start_checkpoint(names or version(0))
    shadow.device_to_learn_on = lambda: torch.device("cpu")
    return shadow


def test_every_tensor_of_the_start_checkpoint_has_its_places():
    shadow = hollow()
    assert fill_table(shadow) is None
    assert shadow.plan.num_proved == len(version(0))
    entry = shadow.plan.known("attention.k")
    (copied,) = entry.copies
    assert copied.view == (HIDDEN * HIDDEN, (HIDDEN, HIDDEN), (HIDDEN, 1))
    assert len(shadow.plan.known("embed.weight").zeros) == 1
    assert all(param.is_meta for param in shadow.module.parameters())
    assert "load_weights" not in vars(shadow.module)


def test_the_table_of_a_gpu_is_recorded_without_touching_it():
    shadow = hollow()
    shadow.device = torch.device("cuda")
    assert fill_table(shadow) is None
    assert shadow.plan.num_proved == len(version(0))


class Computing(Model):
    """Its loader computes what it writes of the norm."""

    def __init__(self, empty) -> None:
        super().__init__(empty)
        self.norm.weight_loader = lambda param, t: param.data.copy_(-t.exp())


def test_a_parameter_that_a_loader_computes_is_named():
    reason = fill_table(hollow(Computing))
    assert reason is not None and reason.endswith("what fills norm")


class Moody(Model):
    """Its loader turns a matrix around, though not the first one."""

    def _load_shard(self, param, tensor, shard):
        turned = tensor.t() if self.num_loads > len(version(0)) else tensor
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(turned)


def test_a_record_that_the_loader_does_not_repeat_is_found():
    reason = fill_table(hollow(Moody))
    assert reason is not None and "attention.qkv" in reason


def test_a_parameter_that_no_tensor_fills_is_named():
    names = version(0)
    del names["attention.v"]
    reason = fill_table(hollow(names=names))
    assert reason is not None and reason.endswith("what fills attention.qkv")


def test_an_engine_with_an_unknown_checkpoint_starts_with_an_empty_table():
    shadow = hollow()
    shadow.start_checkpoint = StartCheckpoint({})
    assert fill_table(shadow) is None
    assert len(shadow.plan) == 0


def test_a_tensor_that_overlaps_a_proved_one_is_rejected_alone():
    shadow = hollow()
    fill_table(shadow)
    proved = shadow.plan.known("norm")
    other = hollow()
    fill_table(other)
    rival = other.plan.known("norm")
    rival.is_proved = False
    shadow.plan.keep("rival", rival)
    shadow.learn()
    assert shadow.plan.known("rival") is None
    assert shadow.plan.known("norm") is proved and proved.is_proved


@pytest.mark.parametrize("is_left_early", [False, True])
def test_lent_memory_is_returned(is_left_early):
    shadow = hollow()
    own = dict(shadow.module.named_parameters())
    try:
        with parameters.lent_memory(
            shadow.module, {"embed.weight"}, torch.device("cpu")
        ) as lent:
            tied = shadow.module.head.weight
            assert tied is shadow.module.embed.weight is lent["embed.weight"]
            assert (
                tied.is_cpu and tied.weight_loader == own["embed.weight"].weight_loader
            )
            assert shadow.module.norm.is_meta
            if is_left_early:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    found = dict(shadow.module.named_parameters())
    assert all(found[name] is param for name, param in own.items())
