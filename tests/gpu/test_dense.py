"""Whole tensors compared with what is served, on a GPU: the log of the host."""

import pytest
import torch

from tests.support.deltas import random_bits, scattered, with_changes
from tests.unit.worker.test_dense import logged
from vllm.inflight import ops
from vllm.inflight.worker.delta import dense
from vllm.inflight.worker.delta.destinations import KnownDestinations
from vllm.inflight.worker.replay_plan import Copied, Entry, Zeroed, view_of
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import elements
from vllm.inflight.worker.shadow.swap import Swap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FORMS = {
    "whole": (1000, 1024),
    "qkv": (768, 512),
    "cut": (600, 333),
    "turned": (512, 300),
    "odd": (1, 12345),
    "deep": (6, 40, 50),
    "padded": (130, 64),
}


def entries(live: dict[str, torch.Tensor]) -> dict[str, Entry]:
    """Of a checkpoint whose tensors are fused, cut, turned round and padded."""

    def entry(shape, dtype, *copies, zeros=()) -> Entry:
        whole = torch.empty(shape, dtype=dtype, device="meta")
        made = [
            Copied(
                param,
                view_of(view(live[param])),
                view_of(part(whole)),
                torch.empty(0),
                is_exact=live[param].dtype == dtype,
            )
            for param, view, part in copies
        ]
        filled = [(copied.param, copied.view) for copied in made]
        return Entry(whole.shape, dtype, made, list(zeros), filled, is_proved=True)

    dtype = live["whole"].dtype

    def same(tensor):
        return tensor

    zeroed = Zeroed("padded", view_of(live["padded"][100:]), torch.empty(0))
    return {
        "whole": entry((1000, 1024), dtype, ("whole", same, same)),
        "q": entry((512, 512), dtype, ("qkv", lambda p: p[:512], same)),
        "k": entry((128, 512), dtype, ("qkv", lambda p: p[512:640], same)),
        "v": entry((128, 512), dtype, ("qkv", lambda p: p[640:], same)),
        # A rank has the second half of the columns, and rows that it has not.
        "cut": entry((700, 666), dtype, ("cut", same, lambda t: t[100:, 333:])),
        "turned": entry((300, 512), dtype, ("turned", lambda p: p.t(), same)),
        "odd": entry((12345,), dtype, ("odd", lambda p: p[0], same)),
        "deep": entry((50, 6, 40), dtype, ("deep", lambda p: p.permute(2, 0, 1), same)),
        "padded": entry(
            (100, 64), dtype, ("padded", lambda p: p[:100], same), zeros=[zeroed]
        ),
    }


def both(dtype, share) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The served parameters, and a checkpoint that differs in a share of elements."""
    live, tensors = {}, {}
    for seed, (name, form) in enumerate(FORMS.items()):
        size = torch.Size(form).numel()
        live[name] = random_bits(dtype, size, seed).view(form)
    for name, entry in entries(live).items():
        served = torch.zeros(entry.shape, dtype=dtype)
        for (_, shape, stride), part, param in (
            (c.view, c.part, c.param) for c in entry.copies
        ):
            begin = live[param].storage_offset()
            at = next(c.view[0] for c in entry.copies if c.param == param)
            value = live[param].as_strided(shape, stride, begin + at)
            served.as_strided(part[1], part[2], part[0]).copy_(value)
        places = scattered(entry.shape.numel(), share, seed=len(tensors))
        flat = with_changes(served.reshape(-1), places)
        tensors[name] = flat.view(entry.shape)
    return live, tensors


def compared(live, tensors, device, *, capacity=1 << 24, num_batches=2) -> ChangeLog:
    live = {name: param.to(device) for name, param in live.items()}
    log = ChangeLog(torch.device(device), capacity)
    known = entries(live)
    comparison = dense.Comparison(log, live, KnownDestinations())
    came = [
        dense.Came(name, known[name], tensor.to(device))
        for name, tensor in tensors.items()
    ]
    with pytest.MonkeyPatch.context() as patched:
        if device == "cuda":  # every tensor here is compared by kernels
            patched.setattr(dense, "log_differences", None)
        for number in range(num_batches):
            comparison.log_differences(came[number::num_batches])
    return log


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.float64],
    ids=str,
)
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.5])
def test_a_gpu_logs_what_the_host_logs_and_the_swap_brings_it_in(dtype, share):
    live, tensors = both(dtype, share)
    wanted = compared(live, tensors, "cpu")
    seen = compared(live, tensors, "cuda")
    assert logged(seen) == logged(wanted)
    assert seen.num_elements == wanted.num_elements > 0
    assert seen.expected()[1] == wanted.expected()[1]
    on_gpu = {name: param.cuda() for name, param in live.items()}
    integer = ops.INTEGERS[dtype.itemsize]
    before = {name: elements(p, integer).clone() for name, p in on_gpu.items()}
    swap = Swap(seen, on_gpu)
    swap()  # it raises unless it meets the bits that were compared
    again = compared({n: p.cpu() for n, p in on_gpu.items()}, tensors, "cuda")
    assert again.num_elements == 0
    swap()
    for name, bits in before.items():
        assert torch.equal(elements(on_gpu[name], integer), bits)


def test_what_finds_no_room_is_counted():
    live, tensors = both(torch.bfloat16, 0.3)
    wanted = compared(live, tensors, "cpu")
    seen = compared(live, tensors, "cuda", capacity=1 << 16)
    assert not seen.has_room
    assert seen.num_elements == wanted.num_elements


def test_equal_tensors_leave_the_log_empty():
    live, tensors = both(torch.bfloat16, 0.01)
    tensors = {name: tensors[name] for name in ("whole", "odd")}
    tensors = {n: live[n].reshape(t.shape).clone() for n, t in tensors.items()}
    log = compared(live, tensors, "cuda")
    assert log.num_elements == 0 and not log.entries.stretches


def test_a_memory_that_is_not_aligned_is_compared():
    live, tensors = both(torch.bfloat16, 0.01)
    shifted = torch.empty(tensors["whole"].numel() + 3, dtype=torch.bfloat16)
    shifted[3:] = tensors["whole"].view(-1)
    wanted = compared(live, {"whole": tensors["whole"]}, "cpu")
    on_gpu = shifted.cuda()[3:].view(tensors["whole"].shape)
    seen = compared(live, {"whole": on_gpu}, "cuda", num_batches=1)
    assert logged(seen) == logged(wanted)


@pytest.mark.parametrize("offset", [1 << 30, -7])
def test_a_logged_place_beyond_the_parameter_is_not_written(offset):
    live, tensors = both(torch.bfloat16, 0.01)
    live, tensors = {"whole": live["whole"]}, {"whole": tensors["whole"]}
    on_gpu = {"whole": live["whole"].cuda()}
    log = ChangeLog(torch.device("cuda"), 1 << 20)
    known = entries(both(torch.bfloat16, 0.01)[0])["whole"]
    came = dense.Came("whole", known, tensors["whole"].cuda())
    dense.Comparison(log, on_gpu, KnownDestinations()).log_differences([came])
    swap = Swap(log, on_gpu)
    log.entries.stretches[0].offsets[3] = offset
    with pytest.raises(RuntimeError, match="other bits than were staged"):
        swap()
    assert torch.equal(
        on_gpu["whole"].cpu().view(torch.int16), live["whole"].view(torch.int16)
    )
