"""Scratch memory: what a loader computes, in memory of its own until it is whole."""

from typing import Any

import pytest
import torch

from tests.support.shadow_on_host import HIDDEN, Model, version
from tests.unit.worker.test_destination_table import Turning, hollow, with_norm_of
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.staging.coverage import Coverage
from vllm.inflight.worker.staging.destination_table import fill_table
from vllm.inflight.worker.staging.scratch import KEPT_SHARE, ScratchParameters

Norm = with_norm_of(lambda param, t: param.data.copy_(-t.exp()))


def started(
    kind: type[torch.nn.Module], names: Any = None
) -> tuple[Any, ScratchParameters]:
    """A shadow model after its start, and the scratch memory of an update."""
    shadow = hollow(kind, names)
    assert fill_table(shadow) is None
    coverage = Coverage(shadow.module, shadow.required, set(), (), shadow.device)
    coverage.watch(lambda weights: None)
    return shadow, ScratchParameters(shadow, coverage)


def test_a_parameter_is_whole_when_its_last_tensor_has_come():
    shadow, scratch = started(Turning)
    new = version(1)
    q, k, v = (new[f"attention.{shard}"] for shard in "qkv")
    for _ in range(2):  # nothing is left of the first time
        assert scratch.load("attention.v", v) == {}
        assert scratch.load("attention.q", q) == {}
        assert all(param.is_meta for param in shadow.module.parameters())
        whole = scratch.load("attention.k", k)
        assert whole.keys() == {"attention.qkv"}
        assert torch.equal(whole["attention.qkv"], torch.cat([q, k.t(), v]))
        scratch._coverage.fills["attention.qkv"].views.clear()


def test_a_tensor_that_the_loader_rejects_leaves_no_memory_in_the_tree():
    shadow, scratch = started(Norm)
    with pytest.raises(RuntimeError):
        scratch.load("norm", torch.zeros(HIDDEN + 1))
    assert all(param.is_meta for param in shadow.module.parameters())
    assert scratch._coverage.handed is scratch._coverage.entry is None


def test_what_a_gpu_has_no_room_for_is_computed_on_the_host():
    shadow, scratch = started(Norm)
    shadow.device, shadow.spare_bytes = torch.device("cuda"), lambda: 0
    norm = version(1)["norm"]
    assert torch.equal(scratch.load("norm", norm)["norm"], -norm.exp())


@pytest.mark.parametrize("is_small", [True, False])
def test_tensors_are_kept_if_all_of_them_are_small(is_small):
    shadow, scratch = started(Norm)
    shadow.nbytes = version(0)["norm"].nbytes * KEPT_SHARE - (not is_small)
    scratch = ScratchParameters(shadow, scratch._coverage)
    norm = version(1)["norm"]
    scratch.keep("norm", norm)
    assert scratch.kept.keys() == ({"norm"} if is_small else set())
    norm.fill_(7.0)  # a transport uses its memory again
    assert not any((kept == 7).any() for kept in scratch.kept.values())


@pytest.mark.parametrize("is_small", [True, False])
def test_with_shadow_parameters_small_tensors_are_found_and_replayed_as_before(
    is_small,
):
    shadow = hollow(Turning)
    shadow.log, shadow.plan = None, Plan()
    num_bytes = sum(version(0)[f"attention.{shard}"].nbytes for shard in "qkv")
    shadow.nbytes = num_bytes * KEPT_SHARE - (not is_small)
    assert fill_table(shadow) is None
    names = {"attention.q", "attention.k", "attention.v"} if is_small else set()
    assert shadow.computed.keys() == names
    assert shadow.plan.num_proved == len(version(0)) - 1, "one of them is turned"


class GptOssForCausalLM(Model):
    """It writes past the loader of a parameter, as upstream's model of that name."""

    def __init__(self, empty) -> None:
        super().__init__(empty)
        self.attention.sinks = torch.nn.Parameter(empty((3, 5)), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "attention.sinks":
                self.attention.sinks.data.copy_(tensor.t().contiguous())
            else:
                super().load_weights([(name, tensor)])


def test_what_a_model_writes_past_loaders_is_seen():
    names = version(0) | {"attention.sinks": torch.zeros(5, 3)}
    shadow, scratch = started(GptOssForCausalLM, names)
    assert shadow.computed == {"attention.sinks": {"attention.sinks"}}
    sinks = torch.randn(5, 3)
    found = scratch.load("attention.sinks", sinks)
    assert torch.equal(found["attention.sinks"], sinks.t())
