"""The destination table is recorded without memory, and proved before it is used."""

import re
from types import SimpleNamespace
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
from vllm.inflight.errors import Cancelled
from vllm.inflight.worker import replay_check
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.shadow import parameters
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging import destination_table
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
    shadow.spare_bytes = lambda: 0
    assert fill_table(shadow) is None
    assert shadow.plan.num_proved == len(version(0))


def calls_of(kind: type[Model]) -> type[Model]:
    """The same model, which counts the calls of its loader while it has no content."""

    class Counted(kind):
        num_calls = 0

        def load_weights(self, weights) -> None:
            Counted.num_calls += 1
            super().load_weights(weights)

    return Counted


def filled(kind: type[Model], names: dict[str, torch.Tensor]) -> tuple[Any, int]:
    """A shadow model after its table was filled, and calls of the loader for that."""
    counted = calls_of(kind)
    shadow = hollow(counted, names)
    counted.num_calls = 0
    assert fill_table(shadow) is None
    return shadow, counted.num_calls


NUM_NORMS = 64


class Norms(Model):
    """It has many small parameters more."""

    def __init__(self, empty) -> None:
        super().__init__(empty)
        self.norms = torch.nn.ParameterList(
            [torch.nn.Parameter(empty((8,)), False) for _ in range(NUM_NORMS)]
        )

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name.startswith("norms."):
                param = self.norms[int(name.rpartition(".")[2])]
                getattr(param, "weight_loader", self._load_norm)(param, tensor)
            else:
                super().load_weights([(name, tensor)])

    @staticmethod
    def _load_norm(param, tensor):
        param.data.copy_(tensor)


def with_norms() -> dict[str, torch.Tensor]:
    return version(0) | {f"norms.{n}": torch.zeros(8) for n in range(NUM_NORMS)}


def test_all_tensors_are_recorded_in_one_call_and_proved_in_another():
    """Each call of a loader walks through the whole model."""
    shadow, num_calls = filled(Norms, with_norms())
    assert shadow.plan.num_proved == len(with_norms())
    assert num_calls == 2


class Keeping(Model):
    """Its loader writes when it has all tensors."""

    def load_weights(self, weights) -> None:
        super().load_weights(list(weights))


def test_tensors_that_a_loader_keeps_until_it_has_all_are_recorded_one_by_one():
    shadow, num_calls = filled(Keeping, version(0))
    assert shadow.plan.num_proved == len(version(0))
    assert num_calls == 1 + len(version(0)) + 1


@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_tensor_that_the_loader_rejects_is_left_out_alone(place):
    """It may fill any parameter: its name does not tell."""
    names = list(version(0).items())
    names.insert(place, ("attention.unknown", torch.zeros(HIDDEN, HIDDEN)))
    shadow, num_calls = filled(Model, dict(names))
    assert shadow.plan.known("attention.unknown") is None
    assert not shadow.plan.passes_over("attention.unknown")
    assert shadow.plan.num_proved == len(version(0))
    assert num_calls <= 3, "the rejection ends a call, and the next tensor begins one"


class Confused(Norms):
    """Its loader reverses one norm, if the norm has memory."""

    def _load_norm(self, param, tensor):
        is_one = param is self.norms[7] and not param.is_meta
        param.data.copy_(tensor.flip(0) if is_one else tensor)


def test_one_wrong_entry_does_not_have_all_others_proved_one_by_one():
    counted = calls_of(Confused)
    shadow = hollow(counted, with_norms())
    counted.num_calls = 0
    assert fill_table(shadow) is None
    assert shadow.computed == {"norms.7": {"norms.7"}}
    assert shadow.plan.num_proved == len(with_norms()) - 1
    halvings = len(with_norms()).bit_length()
    assert counted.num_calls <= 2 + 2 * halvings


class Reversing(Norms):
    """Its loader reverses ten norms, if they have memory."""

    def _load_norm(self, param, tensor):
        is_one = any(param is norm for norm in self.norms[10:20])
        is_one &= not param.is_meta
        param.data.copy_(tensor.flip(0) if is_one else tensor)


def test_one_line_of_the_log_names_entries_that_are_wrong(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(
        replay_check.logger, "error", lambda text, *args: told.append(text % args)
    )
    shadow = hollow(Reversing, with_norms())
    assert fill_table(shadow) is None
    assert shadow.computed.keys() == {f"norms.{n}" for n in range(10, 20)}
    (line,) = told
    names = ", ".join(f"norms.{n}" for n in range(10, 14))
    assert f"10 tensors ({names} and 6 more)" in line
    assert "computed in memory of their own" in line


def late(monkeypatch, kind=Norms, names=None, num_batches=2) -> tuple[Any, list[str]]:
    """A shadow model whose proof has time for some batches alone; what was logged."""
    told: list[str] = []
    logger = destination_table.logger
    monkeypatch.setattr(logger, "warning", lambda text, *args: told.append(text % args))
    monkeypatch.setattr(replay_check, "BATCH_BYTES", 1)
    times = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: float(next(times)))
    monkeypatch.setattr(destination_table, "time", clock)
    monkeypatch.setattr(destination_table, "MOST_PROOF_S", num_batches + 0.5)
    shadow = hollow(kind, names or with_norms())
    assert fill_table(shadow) is None
    return shadow, told


def test_the_start_of_an_engine_waits_for_the_proof_for_a_limited_time(monkeypatch):
    shadow, told = late(monkeypatch)
    plan, num = shadow.plan, len(with_norms())
    assert 0 < plan.num_proved < num and len(plan) == num
    (line,) = told
    assert f"{plan.num_proved} tensors are proved, and those of" in line
    assert f"of {plan.num_unproved} are not" in line
    assert all(param.is_meta for param in shadow.module.parameters())


def test_the_next_update_proves_what_the_start_had_no_time_for(monkeypatch):
    shadow, _ = late(monkeypatch)
    shadow.plan.drop_unconfirmed()  # an update begins with this
    num_proved, seen = shadow.plan.num_proved, list[int]()
    ShadowModel.prove(shadow, seen.append)
    assert shadow.plan.num_proved == len(with_norms()) > num_proved
    assert len(seen) > 1, "it rests between two batches"
    seen.clear()
    ShadowModel.prove(shadow, seen.append)
    assert not seen


def test_a_wrong_entry_that_was_not_looked_at_is_found_by_an_update(monkeypatch):
    shadow, _ = late(monkeypatch, Confused, num_batches=1)
    assert shadow.plan.known("norms.7") is not None
    ShadowModel.prove(shadow, lambda num_bytes: None)
    assert shadow.plan.known("norms.7") is None
    assert shadow.plan.num_proved == len(with_norms()) - 1


def test_an_update_that_ends_during_its_proof_keeps_what_it_has_proved(monkeypatch):
    shadow, _ = late(monkeypatch)
    num_proved = shadow.plan.num_proved

    def abort(num_bytes: int) -> None:
        raise Cancelled("the update was aborted")

    with pytest.raises(Cancelled):
        ShadowModel.prove(shadow, abort)
    assert shadow.plan.num_proved == num_proved
    assert all(param.is_meta for param in shadow.module.parameters())
    ShadowModel.prove(shadow, lambda num_bytes: None)
    assert shadow.plan.num_proved == len(with_norms())


def test_the_log_tells_how_long_recording_and_proving_took(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(
        destination_table.logger, "info", lambda text, *args: told.append(text % args)
    )
    filled(Model, version(0))
    (line,) = told
    assert re.search(r"to find them took [\d.]+ s, and to prove them [\d.]+ s", line)


def with_norm_of(load) -> type[Model]:
    """The model whose norm has this loader."""

    class Made(Model):
        def __init__(self, empty) -> None:
            super().__init__(empty)
            self.norm.weight_loader = load

    return Made


def test_a_parameter_that_a_loader_computes_is_found():
    shadow = hollow(with_norm_of(lambda param, t: param.data.copy_(-t.exp())))
    assert fill_table(shadow) is None
    assert shadow.computed == {"norm": {"norm"}}
    assert shadow.plan.num_proved == len(version(0)) - 1
    assert all(param.is_meta for param in shadow.module.parameters())


class Turning(Model):
    """Its loader turns one of three matrices that share a parameter."""

    def _load_shard(self, param, tensor, shard):
        turned = tensor.t().contiguous() if shard == 1 else tensor
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(turned)


def test_a_parameter_is_computed_of_all_of_its_tensors():
    shadow = hollow(Turning)
    assert fill_table(shadow) is None
    names = {"attention.q", "attention.k", "attention.v"}
    assert shadow.computed == {name: {"attention.qkv"} for name in names}
    assert not any(map(shadow.plan.known, names))


class Moody(Model):
    """Its loader turns a matrix around, though not the first one."""

    def _load_shard(self, param, tensor, shard):
        turned = tensor.t() if self.num_loads > len(version(0)) else tensor
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(turned)


def test_what_a_record_does_not_show_is_left_to_the_loader():
    shadow = hollow(Moody)
    assert fill_table(shadow) is None
    assert set().union(*shadow.computed.values()) == {"attention.qkv"}


@pytest.mark.parametrize(
    "load",
    [
        lambda param, t: param.data.copy_(param.data + t),
        lambda param, t: param.data[1:].copy_(-t[1:]),
        lambda param, t: param.data.add_(t),
    ],
    ids=["it adds to what was there", "it writes a part", "it writes unseen"],
)
def test_a_parameter_that_is_not_made_of_its_tensors_alone_is_named(load):
    reason = fill_table(hollow(with_norm_of(load)))
    assert reason is not None and reason.endswith("all of what fills norm")


class Twice(Model):
    """Its loader computes a whole parameter of each of three tensors."""

    def _load_shard(self, param, tensor, shard):
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(tensor)
        param.data.copy_(-param)


def test_a_parameter_whose_tensors_depend_on_their_order_is_named():
    reason = fill_table(hollow(Twice))
    assert reason is not None and reason.endswith("fills attention.qkv")


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
