"""Dense in, log out: the elements that differ from what is served, and no others."""

import pytest
import torch

from tests.support.deltas import random_bits, scattered, with_changes
from tests.support.triton_compiler import compile_for_gpu, compiles
from tests.support.triton_interpreter import succeeds
from vllm.inflight import ops
from vllm.inflight.errors import ChangeLogFull
from vllm.inflight.worker.delta import dense
from vllm.inflight.worker.replay_plan import Copied, Entry, Zeroed, view_of
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import elements
from vllm.inflight.worker.shadow.swap import Swap

CPU = torch.device("cpu")
NOTHING = torch.empty(0)


def copied(param, view, part) -> Copied:
    """The copy of a part of a tensor into a view of a parameter."""
    is_exact = view.dtype == part.dtype
    return Copied(param, view_of(view), view_of(part), NOTHING, is_exact)


def update(live, tensor, make_copies, zeros=()) -> tuple[ChangeLog, int]:
    """Bring a tensor into the live parameters; the log, and how much it held."""
    entry = Entry(tensor.shape, tensor.dtype, make_copies(tensor), list(zeros))
    log = ChangeLog(CPU, 1 << 20)
    dense.log_differences(log, live, entry, tensor)
    swap = Swap(log, live)
    swap()
    return log, log.num_elements


def qkv(live):
    return lambda t: [copied("qkv", live["qkv"][16:48], t)]


def turned(live):
    return lambda t: [copied("turned", live["turned"].t(), t)]


def columns(live):
    """A rank has the second half of the columns."""
    return lambda t: [copied("cut", live["cut"], t[:, 20:])]


def twice(live):
    return lambda t: [
        copied("qkv", live["qkv"][:16], t[:16]),
        copied("other", live["other"], t[16:]),
    ]


CASES = {
    "fused": (qkv, (32, 64)),
    "turned": (turned, (24, 40)),
    "columns": (columns, (30, 40)),
    "in two parameters": (twice, (20, 64)),
}


@pytest.fixture(params=[7, 300, 1 << 24])
def piece(request, monkeypatch) -> int:
    monkeypatch.setattr(dense, "PIECE", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize("case", CASES)
def test_only_elements_that_differ_are_logged(case, dtype, piece):
    make, shape = CASES[case]
    forms = {"qkv": (64, 64), "turned": (40, 24), "cut": (30, 20), "other": (4, 64)}
    live = {
        name: random_bits(dtype, rows * cols, seed).view(rows, cols)
        for seed, (name, (rows, cols)) in enumerate(forms.items())
    }
    first = random_bits(dtype, shape[0] * shape[1], 9).view(shape)
    update(live, first, make(live))
    integer = ops.INTEGERS[dtype.itemsize]
    before = {name: elements(p, integer).clone() for name, p in live.items()}
    flat = first.view(-1)
    second = with_changes(flat, scattered(len(flat), 0.1, 3)).view(shape)
    _, num = update(live, second, make(live))
    expected = {name: param.clone() for name, param in live.items()}
    held = {copy.param for copy in make(live)(second)}
    differ = first.view(integer) != second.view(integer)
    assert num == int((differ[:, 20:] if case == "columns" else differ).sum())
    for copy in make(expected)(second):
        offset, size, stride = copy.view
        part = second.as_strided(copy.part[1], copy.part[2], copy.part[0])
        expected[copy.param].as_strided(size, stride, offset).view(integer).copy_(
            part.view(integer)
        )
    for name, param in live.items():
        assert torch.equal(param.view(integer), expected[name].view(integer)), name
        is_same = torch.equal(elements(param, integer), before[name])
        assert is_same == (name not in held)


def test_an_equal_tensor_logs_nothing():
    live = {"w": random_bits(torch.bfloat16, 600).view(20, 30)}
    same = live["w"].clone()
    _, num = update(live, same, lambda t: [copied("w", live["w"], t)])
    assert num == 0


def test_a_tensor_of_another_dtype_is_cast_as_its_loader_would():
    live = {"w": torch.randn(20, 30).to(torch.bfloat16)}
    new = torch.randn(20, 30)
    update(live, new, lambda t: [copied("w", live["w"], t)])
    assert torch.equal(live["w"], new.to(torch.bfloat16))


def test_padding_becomes_zero_where_its_loader_writes_zeros():
    live = {"w": torch.ones(12, 8)}
    new = torch.randn(10, 8)
    padding = Zeroed("w", view_of(live["w"][10:]), NOTHING)
    update(live, new, lambda t: [copied("w", live["w"][:10], t)], [padding])
    assert torch.equal(live["w"][:10], new)
    assert not live["w"][10:].any()


def test_minus_zero_is_not_zero_and_a_nan_equals_itself():
    live = {"w": torch.tensor([0.0, torch.nan, 1.0])}
    new = torch.tensor([-0.0, torch.nan, 1.0])
    log, num = update(live, new, lambda t: [copied("w", live["w"], t)])
    assert num == 1
    assert torch.equal(live["w"].view(torch.int32), new.view(torch.int32))
    assert log.entries.stretches[0].offsets.tolist() == [0]


def test_what_differs_beyond_the_room_of_the_log_is_counted_and_not_logged():
    live = {"w": random_bits(torch.bfloat16, 600).view(20, 30)}
    other = {"w": random_bits(torch.bfloat16, 600, 1).view(20, 30)}
    before = elements(live["w"], torch.int16).clone()
    log = ChangeLog(CPU, 64)
    for version in (other["w"], live["w"].clone()):  # the second one is equal
        entry = Entry(
            version.shape, version.dtype, [copied("w", live["w"], version)], []
        )
        dense.log_differences(log, live, entry, version)
    num = int((elements(other["w"], torch.int16) != before).sum())
    assert (log.num_elements, log.has_room, log.entries.stretches) == (num, False, [])
    log.clear()
    log.add("w", torch.arange(2), before[:2], before[:2] + 1)
    dense.log_differences(
        log,
        live,
        Entry(live["w"].shape, torch.bfloat16, [copied("w", live["w"], other["w"])]),
        other["w"],
    )
    with pytest.raises(ChangeLogFull, match=f"changes {num + 2} elements"):
        log.require_room()
    assert torch.equal(elements(live["w"], torch.int16), before)


def compare_padded() -> None:
    """The kernels log what torch logs, and torch compares nothing."""
    from pytest import MonkeyPatch

    from vllm.inflight.worker.delta.destinations import KnownDestinations

    served = random_bits(torch.bfloat16, 130 * 64).view(130, 64)
    new = with_changes(served[:100].reshape(-1), scattered(6400, 0.01, 1)).view(100, 64)
    empty = Zeroed("w", view_of(served[130:]), NOTHING)
    for first in (100, 90):  # `first` rows come, and the others become zero
        live = {"w": served.clone()}
        live["w"][110:] = 0  # as most padding is before
        zeros = [Zeroed("w", view_of(live["w"][first:]), NOTHING), empty]
        tensor = new[:first].clone()
        copies = [copied("w", live["w"][:first], tensor)]
        entry = Entry(tensor.shape, tensor.dtype, copies, zeros, is_proved=True)
        wanted, seen = ChangeLog(CPU, 1 << 20), ChangeLog(CPU, 1 << 20)
        dense.log_differences(wanted, live, entry, tensor)
        comparison = dense.Comparison(seen, live, KnownDestinations())
        comparison._has_kernels = True
        with MonkeyPatch.context() as patched:
            patched.setattr(dense, "log_differences", None)
            comparison.log_differences([dense.Came("w", entry, tensor)])
        assert logged(seen) == logged(wanted)
        assert seen.num_elements == wanted.num_elements > 64
        assert seen.expected() == wanted.expected()
        Swap(seen, live)()
        assert not live["w"][first:].any()
        brought, sent = (t.view(torch.int16) for t in (live["w"][:first], tensor))
        assert torch.equal(brought, sent)


def compare_every_form() -> None:
    """The kernels log what torch logs, whatever the form and the size of a copy."""
    from pytest import MonkeyPatch

    from vllm.inflight.worker.delta import compare_kernels as kernels

    small = {"BLOCK": 128, "LANES": 64, "MOST_NOTED": 16, "NOTED_PER_STEP": 32}
    forms = {
        "flat": ((4, 40), lambda p: p, lambda t: t),
        "fused": ((12, 40), lambda p: p[3:7], lambda t: t),
        "columns": ((30, 24), lambda p: p, lambda t: t[:, 24:]),
        "odd columns": ((30, 23), lambda p: p, lambda t: t[:, 1:]),
        "rows and columns": ((9, 40), lambda p: p[:, 8:24], lambda t: t[2:, 16:32]),
        "turned": ((24, 40), lambda p: p.t(), lambda t: t),
        "deep": ((6, 10, 5), lambda p: p.permute(2, 0, 1), lambda t: t),
        "one": ((3, 3), lambda p: p[1:2, 1:2], lambda t: t[0:1, 0:1]),
    }
    shapes = {
        "columns": (30, 48),
        "odd columns": (30, 24),
        "rows and columns": (11, 48),
    }
    with MonkeyPatch.context() as patched:
        for name, number in small.items():
            patched.setattr(kernels, name, number)
        for dtype in (torch.bfloat16, torch.float8_e5m2, torch.float32, torch.float64):
            for name, (form, view, part) in forms.items():
                if dtype is not torch.bfloat16 and name not in ("columns", "turned"):
                    continue
                param = random_bits(dtype, torch.Size(form).numel(), 1).view(form)
                shape = shapes.get(name, tuple(view(param).shape))
                old = torch.zeros(shape, dtype=dtype)
                part(old).view(ops.INTEGERS[dtype.itemsize]).copy_(
                    view(param).view(ops.INTEGERS[dtype.itemsize])
                )
                for share in (0.02, 1.0):
                    places = scattered(old.numel(), share, 2)
                    new = with_changes(old.reshape(-1), places).view(shape)
                    compare_one(
                        {name: param}, new, copied(name, view(param), part(new))
                    )
        # Sizes at the borders of a step, of a program, and of a word.
        for size in (0, 1, 3, 4, 255, 256, 257, 512, 516):
            param = random_bits(torch.bfloat16, size + 3)
            # At an address that is no multiple of a word, too.
            for first in (0, 3) if size == 256 else (0,):
                whole = with_changes(param, scattered(size + 3, 0.3, size))
                new = whole[first : first + size]
                alone = copied("w", param[:size], new.clone())
                compare_one({"w": param}, new, alone)


def compare_while_the_served_change() -> None:
    """Between the launches more elements become different: none is logged for them."""
    from pytest import MonkeyPatch

    from vllm.inflight.worker.delta import compare_kernels as kernels
    from vllm.inflight.worker.delta.destinations import KnownDestinations

    served = random_bits(torch.bfloat16, 5000)
    new = with_changes(served, scattered(5000, 0.01, 1))
    live, mark = {"w": served.clone()}, 0x5A
    entry = Entry(new.shape, new.dtype, [copied("w", live["w"], new)], is_proved=True)
    log = ChangeLog(CPU, 1 << 20)
    room: list[torch.Tensor] = []

    def take(num_bytes: int) -> torch.Tensor:
        room.append(torch.full((num_bytes + 4096,), mark, dtype=torch.uint8))
        return room[-1][:num_bytes]

    def count(*args, **options):
        found = original(*args, **options)
        live["w"].view(torch.int16).bitwise_xor_(1)  # as a rollback does
        return found

    original = kernels.count
    comparison = dense.Comparison(log, live, KnownDestinations())
    comparison._has_kernels = True
    with MonkeyPatch.context() as patched:
        patched.setattr(dense, "log_differences", None)
        patched.setattr(kernels, "count", count)
        patched.setattr(log, "_take", take)
        comparison.log_differences([dense.Came("w", entry, new)])
    (whole,) = room
    assert (whole[-4096:] == mark).all()
    assert not (whole[:-4096] == mark).all()


def compare_one(live, tensor, copy) -> None:
    """Compare one tensor with torch and with the kernels, which have to agree."""
    from pytest import MonkeyPatch

    from vllm.inflight.worker.delta.destinations import KnownDestinations

    entry = Entry(tensor.shape, tensor.dtype, [copy], is_proved=True)
    wanted = ChangeLog(CPU, 1 << 20)
    dense.log_differences(wanted, live, entry, tensor)
    for num_notes in (1 << 16, 5, 0):  # with few notes all is read once more
        seen = ChangeLog(CPU, 1 << 20)
        assert len(seen._notes) == 1 << 16
        seen._notes = seen._notes[:num_notes]
        comparison = dense.Comparison(seen, live, KnownDestinations())
        comparison._has_kernels = True
        with MonkeyPatch.context() as patched:
            if tensor.numel():
                patched.setattr(dense, "log_differences", None)
            comparison.log_differences([dense.Came("w", entry, tensor)])
        assert logged(seen) == logged(wanted)
        assert seen.num_elements == wanted.num_elements
        assert seen.expected() == wanted.expected()


def logged(log: ChangeLog) -> dict[str, list[tuple[int, int]]]:
    """Offsets and bits of each parameter, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for stretch in log.entries.stretches:
        pairs = zip(stretch.offsets.tolist(), stretch.bits.tolist(), strict=True)
        found.setdefault(stretch.param, []).extend(pairs)
    return {param: sorted(pairs) for param, pairs in found.items()}


@pytest.mark.seconds
def test_kernels_compare_copies_of_every_form_as_torch_does():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:compare_every_form")


@pytest.mark.seconds
def test_kernels_log_no_more_elements_than_they_have_counted():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:compare_while_the_served_change")


@pytest.mark.seconds
def test_kernels_compare_a_padded_tensor_with_its_padding():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:compare_padded")


def compile_kernels() -> None:
    """Compile every kernel for a GPU that need not be there."""
    from vllm.inflight.worker.delta import compare_kernels as kernels

    table = {"rows": "*i64", "owners": "*i32", "found": "*i32", "units": "*i16"}
    numbers = dict.fromkeys(("base", "num_rows", "num_programs", "most"), "i32")
    logged_to = {"rooms": "*i64", "sums": "*i64"}
    for width, in_words in ((1, True), (2, True), (2, False), (8, False)):
        own = [*kernels._options(width, in_words=in_words).items()]
        lanes = "LANES", kernels.LANES
        compile_for_gpu(kernels._count, table | numbers, [*own, lanes])
        more = [("STEP", kernels.NOTED_PER_STEP)]
        more.append(("ROOM_COLUMNS", kernels.ROOM_COLUMNS))
        compile_for_gpu(kernels._log, table | logged_to | numbers, [*own, *more])


@pytest.mark.seconds
def test_every_kernel_that_compares_compiles_for_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    compiles(f"{__name__}:compile_kernels", tmp_path)
