"""A plan is checked before it is replayed, with patterns of distinct elements."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.shadow_on_host import (
    HIDDEN,
    Batches,
    InPlace,
    Model,
    Sets,
    shows,
    version,
)
from vllm.inflight.worker import replay_check
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.replay_plan import Entry, replay

EVERYTHING = len(version(0))


@pytest.fixture(
    autouse=True, params=[replay_check.PIECE, 100], ids=["whole", "in pieces"]
)
def piece(request, monkeypatch) -> None:
    """Each tensor at once, and each larger than what is made or compared at once."""
    monkeypatch.setattr(replay_check, "PIECE", request.param)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield arena


@pytest.fixture
def sets(arena: Arena) -> Sets:
    return Sets(arena)


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """Errors that were logged."""
    found: list[str] = []
    monkeypatch.setattr(replay_check.logger, "error", lambda s, *a: found.append(s % a))
    return found


def same_of_all() -> dict[str, torch.Tensor]:
    """A version whose tensors are all ones: it looks right wherever they end up."""
    return {name: torch.ones_like(tensor) for name, tensor in version(0).items()}


def test_a_wrong_replay_plan_never_goes_live(sets, told):
    sets.stage(same_of_all().items())
    sets.arena.flip()
    wrong = sets.shadow.plan.known("attention.k")
    ((*rest, part, target, is_exact),) = wrong.copies
    turned = part[0], part[1], part[2][::-1]
    wrong.copies = [type(wrong.copies[0])(*rest, turned, target, is_exact)]
    for seed in (2, 3, 4):
        sets.stage(version(seed).items())
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert len(told) == 1
    assert "disagrees with the model" in told[0] and "attention.k" in told[0]
    assert sets.shadow.plan.num_proved == EVERYTHING - 1


def test_two_tensors_that_changed_places_in_the_record_are_found(sets, told):
    """Weights alone would not tell: the two are equal at the first update."""
    sets.stage(same_of_all().items())
    sets.arena.flip()
    entries = [sets.shadow.plan.known(f"attention.{shard}") for shard in "qk"]
    for field in ("copies", "filled"):
        one, other = (getattr(entry, field) for entry in entries)
        setattr(entries[0], field, other)
        setattr(entries[1], field, one)
    for seed in (2, 3):
        sets.stage(version(seed).items())
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert "attention.k, attention.q" in told[0]


@pytest.mark.parametrize("what", ["writes one row more", "leaves the last row"])
def test_a_loader_that_changes_its_mind_is_found(sets, told, what):
    sets.stage(version(1).items())
    sets.arena.flip()

    class Changed(Model):
        @staticmethod
        def _load_shard(param, tensor, shard):
            Model._load_shard(param, tensor, shard)
            if shard and what == "writes one row more":
                param.data[shard * HIDDEN - 1].copy_(tensor[0])
            elif what == "leaves the last row":
                param.data[(shard + 1) * HIDDEN - 1].zero_()

    param = sets.second.attention.qkv
    param.weight_loader = Changed._load_shard
    sets.stage(version(2).items())
    assert "tensors (attention." in told[0]


def test_a_wrong_copy_never_goes_live(sets, monkeypatch, told):
    def replay_but_one(known):
        replay([pair for pair in known if pair[0].params != {"norm"}])

    monkeypatch.setattr(replay_check, "replay", replay_but_one)
    for seed in (1, 2, 3):
        sets.stage(Batches(version(seed)))
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert len(told) == 1 and "1 tensors (norm)" in told[0]


def test_all_tensors_are_replayed_from_the_second_update_on(sets, told):
    sets.stage(Batches(version(1)))
    sets.stager.flip()
    assert sets.shadow.plan.num_proved == 0
    for seed in (2, 3, 4):
        sets.stage(weights := Batches(version(seed)))
        sets.stager.flip()
        assert shows(sets.live, version(seed))
        assert sets.shadow.plan.num_proved == EVERYTHING
        assert weights.placed == version(0).keys(), "received where they end up"
    assert not told


def test_the_loaders_are_called_for_the_proof_alone(sets):
    sets.stage(version(1).items())
    before = sets.second.num_loads
    sets.stage(version(2).items())
    assert sets.second.num_loads == before + EVERYTHING
    sets.stage(version(3).items())
    assert sets.second.num_loads == before + EVERYTHING


def test_a_plan_is_looked_through_again_only_after_it_has_changed(sets, monkeypatch):
    for seed in (1, 2):
        sets.stage(version(seed).items())
    looks = []
    real = replay_check.overlapping

    def overlapping(filled):
        looks.append(None)
        return real(filled)

    monkeypatch.setattr(replay_check, "overlapping", overlapping)
    sets.stage(version(3).items())
    assert not looks
    sets.shadow.plan.reject(["norm"])
    sets.stage(version(4).items())
    assert looks
    assert shows(sets.second, version(4))


def test_a_loader_that_makes_tensors_of_its_own_is_never_replayed(sets):
    """Of a norm that no checkpoint has, when it has seen a key."""

    class Making(Model):
        def load_weights(self, weights):
            super().load_weights(self._with_norm(weights))

        @staticmethod
        def _with_norm(weights):
            keys = []
            for name, tensor in weights:
                keys += [name] * (name == "attention.k")
                yield name, tensor
            for _ in keys:
                yield "norm", torch.zeros(HIDDEN)

    sets.second.__class__ = Making
    for seed in (1, 2, 3, 4):
        named = version(seed)
        del named["norm"]
        sets.stage(Batches(named))
        sets.arena.flip()
        assert shows(sets.live, named | {"norm": torch.zeros(HIDDEN)})


def test_a_tensor_that_the_plan_rejected_is_not_recorded_again(sets):
    sets.stage(version(1).items())
    sets.arena.flip()
    sets.shadow.plan.reject(["norm"])
    for seed in (2, 3, 4):
        sets.stage(version(seed).items())
        sets.arena.flip()
        assert shows(sets.live, version(seed))
        assert sets.shadow.plan.num_proved == EVERYTHING - 1


def test_a_subset_update_restores_weights_that_the_replay_check_overwrote(sets):
    for _ in range(2):
        sets.stage(version(1).items())
        sets.stager.flip()
    for name in version(1):
        sets.shadow.plan.known(name).is_proved = False
    sets.shadow.stale.clear()  # both sets are version 1
    embed = version(3)["embed.weight"]
    sets.stage([("embed.weight", embed)], subset=["embed.weight"])
    sets.stager.flip()
    assert shows(sets.live, version(1) | {"embed.weight": embed})


def test_an_interrupted_replay_check_keeps_what_it_has_proved(sets, monkeypatch):
    sets.stage(version(1).items())
    sets.stager.flip()
    monkeypatch.setattr(replay_check, "BATCH_BYTES", 1)
    calls = []

    def end(num_bytes):
        calls.append(num_bytes)
        if len(calls) == 5:
            raise InterruptedError

    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(sets, "between", end)
        sets.stage(version(2).items())
    assert 0 < sets.shadow.plan.num_proved < EVERYTHING
    sets.stage(version(3).items())
    sets.stager.flip()
    assert shows(sets.live, version(3))
    assert sets.shadow.plan.num_proved == EVERYTHING


class Turning(Model):
    """Its queries are kept transposed: a square tensor has the shape of its place."""

    def __init__(self, empty):
        super().__init__(empty)
        self.attention.out = torch.nn.Parameter(empty((HIDDEN, HIDDEN)), False)
        self.attention.out.weight_loader = self.turned

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "out":
                param = self.attention.out
                param.weight_loader(param, tensor)
            else:
                super().load_weights([(name, tensor)])

    @staticmethod
    def turned(param, tensor):
        param.data.copy_(tensor.t())


class Clearing(Turning):
    """It clears a parameter before it fills it."""

    @staticmethod
    def turned(param, tensor):
        param.data.zero_()
        param.data[:].copy_(tensor)


@pytest.mark.parametrize("kind", [Turning, Clearing])
@pytest.mark.parametrize("transport", [InPlace, Batches])
def test_a_tensor_that_its_loader_transposes_or_clears_is_not_received_in_place(
    arena, kind, transport
):
    def full(seed):
        torch.manual_seed(seed)
        return version(seed) | {"out": torch.randn(HIDDEN, HIDDEN)}

    sets = Sets(arena, kind=kind, first=full(0))
    for seed in range(1, 6):
        named = full(seed)
        sets.stage(weights := transport(named))
        sets.stager.flip()
        assert shows(sets.live, named)
        turned = named["out"].t() if kind is Turning else named["out"]
        assert torch.equal(sets.live.attention.out, turned)
        assert "out" not in weights.placed


def written(batch: list[tuple[str, Entry]]) -> Iterator[dict[str, torch.Tensor]]:
    """The patterns of a batch, digit by digit."""
    for digit in range(replay_check.numbering(batch)[1]):
        patterns = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in batch}
        replay_check.write(patterns, batch, digit)
        yield patterns


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bool),
        *(torch.int8, torch.int32, torch.int64),
    ],
)
def test_no_two_elements_of_a_batch_have_equal_patterns(dtype):
    shapes = {"a": (300, 7), "b": (300, 7), "c": ()}
    batch = [(n, replay_check.Entry(torch.Size(s), dtype)) for n, s in shapes.items()]
    columns = [
        torch.cat([replay_check.as_integers(row[name].view(-1)) for name in shapes])
        for row in written(batch)
    ]
    assert len(torch.stack(columns, 1).unique(dim=0)) == 2 * 2100 + 1


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)
def test_the_patterns_of_the_replay_check_are_finite_numbers(dtype):
    """A GPU that copies many tensors at once has one NaN for all of them."""
    entry = Entry(torch.Size([70_000]), dtype)
    digits = []
    for patterns in written([("a", entry)]):
        pattern = patterns["a"]
        assert pattern.float().isfinite().all()
        digits.append(pattern.view(replay_check.INTEGERS[dtype.itemsize]).long())
    elements = torch.stack(digits, 1)
    assert len(elements.unique(dim=0)) == entry.shape.numel(), "each is another one"


class Made(TorchDispatchMode):
    """Counts the bytes of what torch computes, without views."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, torch.Tensor):
            self.num_bytes += result.nbytes
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_pattern_is_written_once_and_no_number_is_computed_for_an_element(dtype):
    batch = [("a", Entry(torch.Size([1 << 20]), dtype))]
    patterns = {"a": torch.empty(1 << 20, dtype=dtype)}
    for digit in range(replay_check.numbering(batch)[1]):
        with Made() as made:
            replay_check.write(patterns, batch, digit)
        assert made.num_bytes < 1.5 * patterns["a"].nbytes


def test_a_tensor_whose_patterns_hold_few_bits_costs_others_no_more_patterns():
    wide = [(n, Entry(torch.Size([40_000]), torch.bfloat16)) for n in "abc"]
    narrow = ("d", Entry(torch.Size([40_000]), torch.bool))
    wide_alone, narrow_alone = (
        replay_check.numbering(batch) for batch in (wide, [narrow])
    )
    batches = list(replay_check.batches([*wide, narrow]))
    assert sorted(map(replay_check.numbering, batches)) == [narrow_alone, wide_alone]
    assert wide_alone[1] == 2


def views(whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parts of a matrix [40, 48] that are 32 by 40, in memory as parameters may be."""
    return {
        "aligned": whole[:32, :40],
        "at an odd place": whole[1:33, 1:41],
        "with rows of odd length": whole.view(-1)[: 32 * 43].view(32, 43)[:, :40],
        "turned": whole[:, :32].t(),
    }


@pytest.mark.parametrize("name", views(torch.empty(40, 48)))
@pytest.mark.parametrize("other", ["aligned", "turned", "of one element"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_one_bit_that_differs_is_found_in_tensors_of_any_form(name, other, dtype):
    one = views(torch.zeros(40, 48, dtype=dtype))[name]
    rest = views(torch.zeros(40, 48, dtype=dtype))
    rest["of one element"] = torch.zeros((), dtype=dtype).expand(32, 40)
    assert replay_check.is_equal(one, rest[other])
    bits = replay_check.as_integers(one)
    for row, column in ((0, 0), (31, 39), (5, 7), (16, 20)):
        bits[row, column] ^= 1
        assert not replay_check.is_equal(one, rest[other])
        bits[row, column] ^= 1


def test_memory_at_an_odd_address_is_not_read_in_words():
    """A GPU cannot."""
    held = bytearray(64)
    first = torch.frombuffer(held, dtype=torch.uint8).data_ptr()
    even, odd = (
        torch.frombuffer(held, dtype=torch.uint8, offset=-first % 8 + n, count=32)
        for n in (0, 1)
    )
    assert replay_check.in_words(even)[0].dtype is torch.int64
    assert replay_check.in_words(even, odd)[1].dtype is torch.uint8
