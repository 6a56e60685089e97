"""The swap exchanges what was logged, proves it, and undoes what it cannot prove."""

from collections.abc import Callable

import pytest
import torch

from tests.support.deltas import random_bits, scattered
from tests.support.triton_compiler import compile_for_gpu, succeeds
from vllm.inflight import ops
from vllm.inflight.errors import ChangeLogFull
from vllm.inflight.worker.shadow.change_log import ChangeLog, capacity_of
from vllm.inflight.worker.shadow.changed_elements import elements
from vllm.inflight.worker.shadow.swap import Swap, _OnDevice, swap_reference

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
    live: dict[str, torch.Tensor], capacity: int = 1 << 20
) -> tuple[ChangeLog, dict[str, torch.Tensor]]:
    """A log of changes in every parameter, and what they lead to."""
    log, new = ChangeLog(CPU, capacity), {}
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
    found = swap_reference(other.stretches, others)
    Swap(log, live)()
    assert are_equal(live, new) and are_equal(others, new)
    assert found == log.expected()
    for one, two in zip(log.stretches, other.stretches, strict=True):
        assert torch.equal(one.bits, two.bits)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_live_element_that_changed_since_it_was_logged_undoes_the_swap(is_back):
    live = parameters()
    log, _ = logged(live)
    swap = Swap(log, live)
    if is_back:
        swap()
    stretch = log.stretches[3]
    bits_of(live[stretch.param])[stretch.offsets[5]] ^= 1
    before = {name: bits_of(param).clone() for name, param in live.items()}
    kept = [each.bits.clone() for each in log.stretches]
    with pytest.raises(RuntimeError, match="other bits than were staged"):
        swap()
    assert are_equal(live, before)
    assert all(map(torch.equal, kept, [each.bits for each in log.stretches]))


def spoil_bits(log: ChangeLog) -> None:
    log.stretches[2].bits[9] ^= 4


def spoil_order(log: ChangeLog) -> None:
    bits = log.stretches[2].bits
    bits[3], bits[4] = bits[4].clone(), bits[3].clone()


def spoil_place(log: ChangeLog) -> None:
    offsets = log.stretches[2].offsets
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
    log.stretches[-1].offsets[-1] = offset
    with pytest.raises(ValueError, match="beyond its parameter"):
        Swap(log, live)()
    assert are_equal(live, old)


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


def test_the_log_has_a_twentieth_of_the_weights_by_default():
    assert capacity_of(0, 40 << 30) == 2 << 30
    assert capacity_of(0.5, 40 << 30) == 1 << 29


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    live = parameters()
    log, new = logged(live)
    # Elements that other ranks serve have no place here.
    for stretch in log.stretches:
        stretch.offsets[0] = -1
    others = {name: param.clone() for name, param in live.items()}
    copied = ChangeLog(CPU, 1 << 20)
    for param, width, offsets, bits, first in log.stretches:
        space = copied.reserve(param, len(offsets), width)
        assert space is not None and space.first == first
        space.offsets.copy_(offsets)
        space.bits.copy_(bits)
    expected = swap_reference(copied.stretches, others)
    kernel = _OnDevice(CPU, log.stretches, live)
    assert kernel() == expected
    for name in live:
        assert torch.equal(bits_of(live[name]), bits_of(others[name])), name
        assert not torch.equal(bits_of(live[name]), new[name])
    for one, two in zip(log.stretches, copied.stretches, strict=True):
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
    succeeds(f"{__name__}:compile_kernel", tmp_path)
