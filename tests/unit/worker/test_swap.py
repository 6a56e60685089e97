"""The swap exchanges what was logged, proves it, and undoes what it cannot prove."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.deltas import random_bits, scattered
from tests.support.triton_compiler import compile_for_gpu, compiles
from tests.support.triton_interpreter import succeeds
from vllm.inflight import ops
from vllm.inflight.errors import ArenaTorn, ChangeLogFull
from vllm.inflight.worker.shadow import change_log
from vllm.inflight.worker.shadow.change_log import (
    ChangeLog,
    capacity_of,
    host_capacity_of,
    notes_bytes,
)
from vllm.inflight.worker.shadow.changed_elements import addresses, elements
from vllm.inflight.worker.shadow.swap import Swap, _OnDevice, _OnHost, swap_reference

CPU = torch.device("cpu")
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]


def parameters() -> dict[str, torch.Tensor]:
    """One parameter of each width, in memory that they share with others."""
    return {
        str(dtype): random_bits(dtype, 3100, seed)[7:3000]
        for seed, dtype in enumerate(DTYPES)
    }


def bits_of(param: torch.Tensor) -> torch.Tensor:
    return elements(param, ops.INTEGERS[param.element_size()])


def logged(
    live: dict[str, torch.Tensor], capacity: int = 1 << 20, host_capacity: int = 0
) -> tuple[ChangeLog, dict[str, torch.Tensor]]:
    """A log of changes in every parameter, and what they lead to."""
    log, new = ChangeLog(CPU, capacity, host_capacity), {}
    for seed, (name, param) in enumerate(live.items()):
        new[name] = bits_of(param).clone()
        for share in (0.1, 0.3):  # in two stretches, which have no element in common
            at = scattered(1400, share, seed) + (1400 if share > 0.2 else 0)
            brought = bits_of(random_bits(param.dtype, len(at), seed + 50))
            log.add(name, at, bits_of(param)[at], brought)
            new[name][at] = brought
    return log, new


def are_equal(live: dict[str, torch.Tensor], bits: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(bits_of(live[name]), bits[name]) for name in live)


def test_a_swap_is_a_commit_and_the_next_one_the_way_back():
    live = parameters()
    old = {name: bits_of(param).clone() for name, param in live.items()}
    log, new = logged(live)
    addresses = [param.data_ptr() for param in live.values()]
    swap = Swap(log, live)
    for _ in range(3):
        swap()
        assert are_equal(live, new)
        swap()
        assert are_equal(live, old)
    assert [param.data_ptr() for param in live.values()] == addresses


def test_the_native_swap_and_torch_exchange_the_same():
    live = parameters()
    log, new = logged(live)
    others = {name: param.clone() for name, param in live.items()}
    other, _ = logged(others)
    found = swap_reference(other.entries.stretches, others)
    Swap(log, live)()
    assert are_equal(live, new) and are_equal(others, new)
    assert found == log.expected()
    for one, two in zip(log.entries.stretches, other.entries.stretches, strict=True):
        assert torch.equal(one.bits, two.bits)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_live_element_that_changed_since_it_was_logged_undoes_the_swap(is_back):
    live = parameters()
    log, _ = logged(live)
    swap = Swap(log, live)
    if is_back:
        swap()
    stretch = log.entries.stretches[3]
    bits_of(live[stretch.param])[stretch.offsets[5]] ^= 1
    before = {name: bits_of(param).clone() for name, param in live.items()}
    kept = [each.bits.clone() for each in log.entries.stretches]
    with pytest.raises(RuntimeError, match="other bits than were staged"):
        swap()
    assert are_equal(live, before)
    assert all(map(torch.equal, kept, [each.bits for each in log.entries.stretches]))


def write_meanwhile(live: dict[str, torch.Tensor], log: ChangeLog) -> None:
    stretch = log.entries.stretches[1]
    bits_of(live[stretch.param])[stretch.offsets[2]] ^= 1


def break_off(live: dict[str, torch.Tensor], log: ChangeLog) -> None:
    raise torch.OutOfMemoryError("in the middle of it")


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize(
    ("during", "told"),
    [
        (write_meanwhile, "other bits, and could not be undone"),
        (break_off, r"broke off: OutOfMemoryError\('in the middle of it'\)"),
    ],
)
def test_a_swap_whose_undoing_fails_says_that_the_weights_are_a_mixture(
    is_back, during, told
):
    """The engine ends at this error: it is not one after which all is as before."""
    live = parameters()
    log, _ = logged(live)
    swap = Swap(log, live)
    if is_back:
        swap()
    exchange, num_calls = swap._swap, 0

    def interrupted():
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # the first one exchanges, and this one undoes
            during(live, log)
        return exchange()

    swap._swap = interrupted
    write_meanwhile(live, log)
    with pytest.raises(ArenaTorn, match=told):
        swap()
    assert num_calls == 2


def spoil_bits(log: ChangeLog) -> None:
    log.entries.stretches[2].bits[9] ^= 4


def spoil_order(log: ChangeLog) -> None:
    bits = log.entries.stretches[2].bits
    bits[3], bits[4] = bits[4].clone(), bits[3].clone()


def spoil_place(log: ChangeLog) -> None:
    offsets = log.entries.stretches[2].offsets
    offsets[0] = 2900


@pytest.mark.parametrize("spoil", [spoil_bits, spoil_order, spoil_place])
def test_a_damaged_log_undoes_the_swap(spoil: Callable[[ChangeLog], None]):
    live = parameters()
    old = {name: bits_of(param).clone() for name, param in live.items()}
    log, _ = logged(live)
    swap = Swap(log, live)
    spoil(log)
    with pytest.raises(RuntimeError, match="other bits than were staged"):
        swap()
    assert are_equal(live, old)


@pytest.mark.parametrize("offset", [-1, 2993, 2**31 - 1])
def test_an_offset_beyond_the_parameter_is_found_before_the_first_element(offset):
    live = parameters()
    old = {name: bits_of(param).clone() for name, param in live.items()}
    log, _ = logged(live)
    log.entries.stretches[-1].offsets[-1] = offset
    with pytest.raises(ValueError, match="beyond its parameter"):
        Swap(log, live)()
    assert are_equal(live, old)


def test_of_several_parameters_the_one_that_moved_is_named():
    live = parameters()
    log, _ = logged(live)
    swap = Swap(log, live)
    *_, last = sorted(live)
    live[last].data = live[last].data.clone()
    with pytest.raises(RuntimeError, match=f"{last} does not lie where"):
        swap()


def test_addresses_are_read_without_the_functions_of_a_parameters_class():
    asked: list[str] = []

    class Upstreams(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    live = {name: Upstreams(torch.zeros(8)) for name in "abc"}
    found = addresses(live, ["b", "a", "b"])
    assert asked == []
    assert found.tolist() == [live[name].data_ptr() for name in "bab"]
    assert asked == ["data_ptr"] * 3
    assert addresses(live, []).shape == (0,)


def test_a_parameter_that_moved_is_not_swapped():
    live = {"w": torch.nn.Parameter(torch.zeros(64), requires_grad=False)}
    log = ChangeLog(CPU, 1 << 10)
    at = torch.arange(3)
    log.add("w", at, bits_of(live["w"])[at], torch.ones(3).view(torch.int32))
    swap = Swap(log, live)
    live["w"].data = torch.zeros(64)
    with pytest.raises(RuntimeError, match="w does not lie where"):
        swap()
    assert not live["w"].any()


def test_a_log_without_changes_is_swapped():
    swap = Swap(ChangeLog(CPU, 64), {})
    swap()
    swap()


def test_a_log_that_is_too_small_says_how_large_it_has_to_be():
    live = parameters()
    log, _ = logged(live, capacity=4096)
    with pytest.raises(ChangeLogFull, match=r"--inflight-delta-gib 0\.001 has") as full:
        log.require_room()
    assert not log.has_room
    large, _ = logged(live, capacity=4096 + full.value.missing_bytes)
    large.require_room()
    with pytest.raises(ChangeLogFull):
        logged(live, capacity=4088 + full.value.missing_bytes)[0].require_room()
    log.clear()
    log.require_room()


def test_the_log_and_its_notes_have_a_twentieth_of_the_weights_by_default():
    for num_bytes in (16_381_470_720, 40 << 30, 10**12):
        left = num_bytes // 20 - notes_bytes(capacity_of(0, num_bytes))
        assert 0 <= left - capacity_of(0, num_bytes) < 1 << 17
    for num_bytes in (1 << 16, 10**9):  # where the notes take more than a 128th
        twentieth = max(num_bytes // 20, 1 << 16)
        assert 0 <= twentieth * 127 / 128 - capacity_of(0, num_bytes) < 16
    assert capacity_of(0.5, 40 << 30) == 1 << 29


def test_the_log_goes_on_in_a_quarter_of_the_weights_by_default():
    assert host_capacity_of(-1, 40 << 30) == 10 << 30
    assert host_capacity_of(0, 40 << 30) == 0
    assert host_capacity_of(0.5, 40 << 30) == 1 << 29


def test_elements_of_every_width_are_numbered_in_one_row():
    """The number of an element decides what its bits contribute to the proof."""
    log, _ = logged(parameters())
    assert len({stretch.width for stretch in log.entries.stretches}) == 4
    firsts = [stretch.first for stretch in log.entries.stretches]
    counts = [len(stretch.offsets) for stretch in log.entries.stretches]
    assert firsts == [sum(counts[:number]) for number in range(len(counts))]
    assert log.num_elements == log.expected()[1] == sum(counts)


def test_rows_of_an_unknown_width_are_refused_before_the_first_element():
    live = {"w": torch.zeros(64, dtype=torch.int32)}
    log = ChangeLog(CPU, 1 << 10)
    at = torch.arange(3)
    log.add("w", at, live["w"][at], torch.ones(3, dtype=torch.int32))
    swap = Swap(log, live)
    assert isinstance(swap._swap, _OnHost)
    swap._swap._rows = np.concatenate([swap._swap._rows] * 2)
    swap._swap._rows[-1, -1] = 3
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes"):
        swap()
    assert not live["w"].any()


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory comes in blocks that hold few stretches."""
    monkeypatch.setattr(change_log, "BLOCK_BYTES", 1 << 12)


def test_a_log_without_room_goes_on_in_host_memory_and_the_swap_takes_all_of_it(
    short_blocks: None,
):
    live = parameters()
    old = {name: bits_of(param).clone() for name, param in live.items()}
    log, new = logged(live, capacity=4096, host_capacity=1 << 16)
    log.require_room()
    assert len(log._blocks) > 1
    assert log.num_bytes <= 4096 + log.host_bytes <= 4096 + (1 << 16)
    swap = Swap(log, live)
    for _ in range(2):
        swap()
        assert are_equal(live, new)
        swap()
        assert are_equal(live, old)


@pytest.mark.parametrize("number", [0, -1], ids=["beside the weights", "on the host"])
def test_damage_in_either_part_undoes_the_swap(short_blocks: None, number: int):
    live = parameters()
    old = {name: bits_of(param).clone() for name, param in live.items()}
    log, _ = logged(live, capacity=4096, host_capacity=1 << 16)
    swap = Swap(log, live)
    log.entries.stretches[number].bits[1] ^= 1
    with pytest.raises(RuntimeError, match="other bits than were staged"):
        swap()
    assert are_equal(live, old)


def test_a_log_with_room_takes_no_host_memory():
    log, _ = logged(parameters(), host_capacity=1 << 20)
    assert log.host_bytes == 0


def test_a_log_is_full_when_both_parts_are_and_the_named_size_has_room(
    short_blocks: None,
):
    live = parameters()
    log, _ = logged(live, capacity=4096, host_capacity=1 << 12)
    named = r"room for 4096, and for 4096 in host memory\. --inflight-delta-gib (\S+)"
    with pytest.raises(ChangeLogFull, match=named) as full:
        log.require_room()
    assert not log.has_room and full.value.missing_bytes > 0
    found = re.search(named, str(full.value))
    assert found is not None
    logged(live, capacity=capacity_of(float(found[1]), 0))[0].require_room()
    # What comes after it is counted, and finds no room although it would fit.
    num = log.num_elements
    assert log.reserve(next(iter(live)), 1, 1) is None
    assert log.num_elements == num + 1
    log.clear()
    log.require_room()


def test_host_memory_is_kept_and_short_blocks_give_way_to_a_long_one(
    short_blocks: None,
):
    log = ChangeLog(CPU, 64, 1 << 14)
    for _ in range(2):
        for _ in range(4):
            assert log.reserve("w", 500, 4) is not None  # a block has room for one
        assert log.host_bytes == 1 << 14
        log.clear()
        assert log.host_bytes == 1 << 14
    assert log.reserve("w", 1500, 4) is not None
    assert log.host_bytes <= 1 << 14
    assert log.reserve("w", 500, 4) is not None
    assert log.reserve("w", 500, 4) is None


def test_a_host_without_memory_is_named(monkeypatch: pytest.MonkeyPatch):
    log = ChangeLog(CPU, 64, 1 << 14)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cannot pin")

    monkeypatch.setattr(torch, "empty", fail)
    assert log.reserve("w", 500, 4) is None
    with pytest.raises(ChangeLogFull, match=r"does not have \(cannot pin\)"):
        log.require_room()


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    live = parameters()
    log, new = logged(live, capacity=4096, host_capacity=1 << 20)
    # Elements that other ranks serve have no place here.
    for stretch in log.entries.stretches:
        stretch.offsets[0] = -1
    others = {name: param.clone() for name, param in live.items()}
    copied = ChangeLog(CPU, 1 << 20)
    for param, width, offsets, bits, first in log.entries.stretches:
        space = copied.reserve(param, len(offsets), width)
        assert space is not None and space.first == first
        space.offsets.copy_(offsets)
        space.bits.copy_(bits)
    expected = swap_reference(copied.entries.stretches, others)
    kernel = _OnDevice(CPU, log.entries, live)
    assert kernel() == expected
    for name in live:
        assert torch.equal(bits_of(live[name]), bits_of(others[name])), name
        assert not torch.equal(bits_of(live[name]), new[name])
    for one, two in zip(log.entries.stretches, copied.entries.stretches, strict=True):
        assert torch.equal(one.bits, two.bits)
    terms, num = kernel()
    assert (ops.Digest.ZERO - terms, num) == expected


def compile_kernel() -> None:
    """Compile the kernel for a GPU that need not be there."""
    from vllm.inflight.worker.shadow import triton_kernels as kernels

    tables = {"rows": "*i64", "owners": "*i32", "sums": "*i64"}
    for width, integer in kernels.INTEGERS.items():
        constants = [("WIDTH", width), ("INTEGER", integer), ("BLOCK", kernels.BLOCK)]
        compile_for_gpu(kernels._swap, tables, constants)


@pytest.mark.seconds
def test_the_kernel_exchanges_what_torch_would():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:check")


@pytest.mark.seconds
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    compiles(f"{__name__}:compile_kernel", tmp_path)
