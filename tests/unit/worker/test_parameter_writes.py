"""What a method of a worker extension writes itself, where parameters stay in place.

Shadow parameters, plan and arena are those of a GPU, on memory of the host. A write is
taken if it can be accounted for, and a version is complete if each element was written
once; whatever else a method does.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.shadow_on_host import HIDDEN, SHARDS, Sets, shows, version
from vllm.inflight.errors import Conflict, InflightError, WeightsMismatch
from vllm.inflight.update import Manifest
from vllm.inflight.worker.adopted_call import AdoptedCall, running
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.adopted.door import Door
from vllm.inflight.worker.staging.adopted.guard import Guard
from vllm.inflight.worker.staging.loader import UpdateLoader

QKV, NORM, EMBED = "attention.qkv", "norm", "embed.weight"


@pytest.fixture
def sets() -> Iterator[Sets]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield Sets(arena)


class Update:
    """One adopted update of these sets, with its door."""

    def __init__(self, sets: Sets) -> None:
        self.sets = sets
        sets.stager.open()
        sets.arena.settle()
        self.intake = UpdateLoader(
            sets.shadow,
            Manifest(),
            verify=True,
            allow_nonfinite=False,
            cancelled=lambda: False,
            progress=lambda num_bytes, num_tensors: None,
            first_write=self._open,
        )
        self.intake.coverage.lets_write = True
        self.is_open = False
        self.door = Door(
            self.intake.load_weights,
            sets.second,
            sets.live,
            clones=False,
            device=torch.device("cpu"),
            writes=self.intake.writes,
            before_write=self._open,
        )
        self.intake.coverage.stand_before(self.door)

    def _open(self) -> None:
        if self.is_open:
            return
        self.is_open = True
        ShadowModel.prove(self.sets.shadow, lambda num_bytes: None)
        self.intake.coverage.watch(self.door, at_once=False)

    def run(self, method: Callable[[Any], object]) -> None:
        """Call a method on the shadow model, as a staging thread does."""
        call = AdoptedCall("it", self.door.note)
        with torch.no_grad(), running(call), Guard(call, self.door):
            method(self.sets.second)
        call.end()
        self.door.bring_home()
        if self.door.failure is not None:
            raise self.door.failure

    def end(self) -> str | None:
        """The digest of what was written itself; raises unless all is whole."""
        self.door.require_all_through(self.intake.coverage.begun)
        self.intake.verdict()
        return self.intake.written_digest

    def close(self) -> None:
        self.intake.coverage.unwatch()


@pytest.fixture
def update(sets: Sets) -> Iterator[Update]:
    begun = Update(sets)
    yield begun
    begun.close()


def kernel(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a version."""
    padding = torch.zeros(2, HIDDEN)
    return {
        EMBED: torch.cat([named["embed.weight"], padding]),
        QKV: torch.cat([named[f"attention.{shard}"] for shard in SHARDS]),
        NORM: named["norm"],
    }


def copy_all(model: Any, seed: int = 1, *, but: str = "") -> None:
    params = dict(model.named_parameters())
    for name, tensor in kernel(version(seed)).items():
        if name != but:
            params[name].copy_(tensor)


def test_copies_into_every_parameter_are_a_whole_version(
    sets: Sets, update: Update
) -> None:
    update.run(copy_all)
    assert update.end() is not None
    assert shows(sets.second, version(1)) and shows(sets.live, version(0))
    assert sets.shadow.stale == {EMBED, QKV, NORM}


def test_the_digest_is_of_the_content_and_not_of_the_way(sets: Sets) -> None:
    found = []
    for seed in (1, 2, 1):
        update = Update(sets)
        update.run(lambda model, seed=seed: copy_all(model, seed))
        found.append(update.end())
        update.close()

    def by_parts(model: Any) -> None:
        copy_all(model, but=QKV)
        for number, shard in enumerate(SHARDS):
            part = model.attention.qkv.data[number * HIDDEN : (number + 1) * HIDDEN]
            part.copy_(version(1)[f"attention.{shard}"])

    update = Update(sets)
    update.run(by_parts)
    found.append(update.end())
    update.close()
    assert found[0] == found[2] == found[3] != found[1]


def test_a_parameters_own_loader_may_be_called(sets: Sets, update: Update) -> None:
    def by_loaders(model: Any) -> None:
        named = version(1)
        weight = model.embed.weight
        weight.weight_loader(weight, named["embed.weight"])  # it pads with zeros
        for shard, number in SHARDS.items():
            fused = model.attention.qkv
            fused.weight_loader(fused, named[f"attention.{shard}"], number)
        model.norm.data.copy_(named["norm"])

    update.run(by_loaders)
    assert update.end() is not None
    assert shows(sets.second, version(1))


def test_what_was_written_may_be_read_and_what_was_not_may_not(
    sets: Sets, update: Update
) -> None:
    def read(model: Any) -> None:
        model.norm.copy_(version(1)["norm"])
        assert model.norm.sum().isfinite()
        torch.empty_like(model.attention.qkv)
        model.attention.qkv.view(-1)[3:].detach()
        with pytest.raises(Conflict, match=r"reads attention\.qkv of the shadow"):
            model.attention.qkv.sum()

    with pytest.raises(Conflict, match="reads"):
        update.run(read)


def test_live_weights_may_be_read_and_not_written(sets: Sets, update: Update) -> None:
    """A sum with live weights is right, and one with others is not."""
    delta = torch.ones(HIDDEN)

    def write(model: Any) -> None:
        copy_all(model, but=NORM)
        model.norm.copy_(sets.live.norm + delta)

    update.run(write)
    update.end()
    assert torch.equal(sets.second.norm, version(0)["norm"] + delta)
    with pytest.raises(Conflict, match="of the live model"):
        update.run(lambda model: sets.live.norm.copy_(delta))
    assert shows(sets.live, version(0))


@pytest.mark.parametrize("first", ["load", "write"])
def test_one_parameter_is_loaded_or_written_and_not_both(
    sets: Sets, update: Update, first: str
) -> None:
    named = version(1)
    rest = [(name, named[name]) for name in ("embed.weight", "norm")]
    loads = [("attention.q", named["attention.q"])]

    def write(model: Any) -> None:
        model.attention.qkv.data[HIDDEN:].copy_(kernel(named)[QKV][HIDDEN:])

    def both(model: Any) -> None:
        if first == "load":
            model.load_weights(rest + loads)
            write(model)
        else:
            write(model)
            model.load_weights(rest + loads)

    with pytest.raises(InflightError, match=r"attention\.qkv"):
        update.run(both)
        update.end()


def test_a_replayed_tensor_counts_as_loaded(sets: Sets) -> None:
    for seed in (1, 2):  # recorded, and proved
        update = Update(sets)
        update.run(
            lambda model, seed=seed: model.load_weights(list(version(seed).items()))
        )
        assert update.end() is None
        update.close()
    update = Update(sets)

    def write(model: Any) -> None:
        model.norm.copy_(version(3)["norm"])
        model.load_weights(list(version(3).items()))

    update.run(write)
    with pytest.raises(WeightsMismatch, match="norm: load_weights has filled it"):
        update.end()
    update.close()


def missing(update: Update, name: str) -> list[int]:
    """The rows of a parameter that were not written so far."""
    shape = update.sets.shadow.required[name]
    written = torch.zeros(shape, dtype=torch.bool)
    for offset, size, stride in update.intake.coverage.fills[name].views:
        written.as_strided(size, stride, offset).fill_(True)
    return [row for row in range(shape[0]) if not written[row].all()]


PARTS = st.tuples(
    st.sampled_from([QKV, NORM, EMBED]),
    st.sampled_from([0, 4, 8, 16]),
    st.sampled_from([4, 8, 16, 3 * HIDDEN]),
)
ACTS = st.one_of(
    st.tuples(st.just("write"), PARTS),
    st.tuples(st.just("fill"), PARTS),
    st.tuples(st.just("add"), PARTS),
    st.tuples(st.just("own"), PARTS),
    st.tuples(st.just("from another"), PARTS),
    st.tuples(st.just("load"), st.sampled_from(sorted(version(0)))),
)


@settings(max_examples=150, deadline=None)
@example(acts=[("own", (NORM, 0, 16))], is_whole=True, catches=False)
@example(acts=[("add", (NORM, 0, 16))], is_whole=True, catches=True)
@example(
    acts=[("write", (EMBED, 0, 16)), ("from another", (QKV, 0, 8))],
    is_whole=True,
    catches=False,
)
@example(
    acts=[("write", (EMBED, 4, 16)), ("from another", (QKV, 0, 8))],
    is_whole=True,
    catches=True,
)
@example(
    acts=[
        ("write", (EMBED, 0, 8)),
        ("write", (EMBED, 4, 8)),
        ("from another", (QKV, 0, 16)),
    ],
    is_whole=True,
    catches=False,
)
@example(
    acts=[("fill", (QKV, 0, 8)), ("write", (QKV, 4, 16))], is_whole=True, catches=False
)
@given(acts=st.lists(ACTS, max_size=4), is_whole=st.booleans(), catches=st.booleans())
def test_a_version_that_is_accepted_is_the_one_that_was_sent(
    acts: list[Any], is_whole: bool, catches: bool
) -> None:
    """Whatever a method does besides, each element came from this version, or from a
    number that was filled in."""
    named = version(1)
    wanted = kernel(named)

    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = Sets(arena)
        update = Update(sets)
        expected = {name: tensor.clone() for name, tensor in wanted.items()}

        def act(model: Any, kind: str, what: Any) -> None:
            params = dict(model.named_parameters())
            if kind == "load":
                model.load_weights([(what, named[what])])
                return
            name, begin, end = what
            part, source = params[name].data[begin:end], wanted[name][begin:end]
            if kind == "write":
                part.copy_(source)
            elif kind == "fill" and part.numel():
                part.fill_(1.0)
                expected[name][begin:end] = 1.0
            elif kind == "add":
                part.add_(source)
            elif kind == "own":
                part.copy_(part * 2)
            elif kind == "from another" and name == QKV:
                part = part[: len(wanted[EMBED])]
                part.copy_(params[EMBED][: len(part)])
                expected[name][begin : begin + len(part)] = expected[EMBED][: len(part)]

        def method(model: Any) -> None:
            for kind, what in acts:
                if catches:
                    with suppress(InflightError):
                        act(model, kind, what)
                else:
                    act(model, kind, what)
            for name, param in model.named_parameters() if is_whole else ():
                for row in missing(update, name):
                    param.data[row].copy_(wanted[name][row])

        try:
            update.run(method)
            update.end()
        except InflightError:
            assert acts or not is_whole
        else:
            for name, param in sets.second.named_parameters():
                assert torch.equal(param, expected[name])
        finally:
            update.close()
        assert shows(sets.live, version(0))
