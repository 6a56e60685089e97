"""What a delta costs the staging thread does not grow with the number of tensors.

Decoding shares the interpreter with that thread. So calls are counted: of torch, each
of which is a call of CUDA on a GPU, of reads that wait for the GPU, and of Python.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.shadow_on_host import Batches, Sets
from tests.support.triton_interpreter import succeeds
from tests.unit.worker.test_delta_writer import delta, stepped
from vllm.inflight.delta import Encoder, Part
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.delta.parts import named
from vllm.inflight.update import Manifest
from vllm.inflight.worker.delta import writer
from vllm.inflight.worker.delta.device_writer import DeviceWriter, copy_elements
from vllm.inflight.worker.delta.writer import DeltaWriter
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model.layers import parameters_by_name
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import ChangedElements
from vllm.inflight.worker.shadow.swap import Swap
from vllm.inflight.worker.staging import loader
from vllm.inflight.worker.verify import drift

CPU = torch.device("cpu")
FEW, MANY = 6, 24
MOST_CALLS_EACH = 8
"""Functions of ours that may be called for each tensor of a delta."""
MOST_OPS = 40
"""Operators of torch that may be called for a delta of one part."""
MOST_OPS_A_PART = 10
"""Operators of torch for each further part that comes with it."""
MOST_READS = 3
"""Reads that may wait for a GPU."""


class Flat(torch.nn.Module):
    """A model of `num` vectors."""

    num = 0

    def __init__(self, empty: Callable[..., Any]) -> None:
        super().__init__()
        for name in version(0, self.num):
            param = torch.nn.Parameter(empty((300,)), requires_grad=False)
            setattr(self, name, param)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            param = getattr(self, name)
            getattr(param, "weight_loader", lambda p, t: p.data.copy_(t))(param, tensor)


def version(seed: int, num: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(300, generator=random) for n in range(num)}


class Counted(TorchDispatchMode):
    """Counts the calls between `with` and its end, without those of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_off = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.is_off:
            self.counts["ops"] += 1
        return func(*args, **(kwargs or {}))

    def called(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and not self.is_off:
            # What torch does to tell of its operators is no call of ours.
            is_ours = "/inflight/" in frame.f_code.co_filename
            self.counts["calls"] += is_ours

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context: what runs is counted."""
        reads = {
            name: getattr(torch.Tensor, name) for name in ("cpu", "tolist", "item")
        }
        for name, real in reads.items():
            setattr(torch.Tensor, name, self.read(real))
        sys.setprofile(self.called)
        try:
            with self:
                yield
        finally:
            sys.setprofile(None)
            for name, real in reads.items():
                setattr(torch.Tensor, name, real)

    def read(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            self.counts["reads"] += not self.is_off
            return real(*args)

        return read

    def copies(self, real: Callable[[Launches], None]) -> Callable[[Launches], None]:
        def run(launches: Launches) -> None:
            self.counts["copies"] += 1
            real(launches)

        return run

    def kernel(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self.counts["launches"] += 1
            self.is_off = True
            try:
                return real(*args, **options)
            finally:
                self.is_off = False

        return launch


def in_parts(old: Any, new: Any, base: str, num_parts: int) -> tuple[Manifest, Any]:
    """A delta of so many parts, and its manifest."""
    manifest, _ = delta(old, new, base)
    parts: list[Part] = []
    size = -(-len(new) // num_parts)
    for number, name in enumerate(new):
        if number % size == 0:
            encoder = Encoder()
        parts += encoder.add(number, old[name], new[name])
        if number % size == size - 1 or number == len(new) - 1:
            parts += encoder.finish()
    assert len(parts) == num_parts
    return manifest, dict(named(parts))


def counted(
    num: int, *, is_logged: bool, num_parts: int = 1, spare: float = math.inf
) -> Counter[str]:
    """The calls that a delta of so many tensors takes, after one of the same."""
    Flat.num = num
    counted = Counted()
    with pytest.MonkeyPatch.context() as patch, Arena.open(CPU, 1 << 26) as arena:
        from vllm.inflight.delta import triton_kernels as codec
        from vllm.inflight.worker.delta import triton_kernels as kernels
        from vllm.inflight.worker.verify import triton_kernels as of_drift

        for module, names in (
            (codec, ("decode_gaps", "decode_others", "decode_runs")),
            (kernels, ("write", "sample", "copy")),
            (of_drift, ("squares",)),
        ):
            for name in names:
                patch.setattr(module, name, counted.kernel(getattr(module, name)))
        sets = Sets(arena, kind=Flat, first=version(0, num))
        sets.shadow.spare_bytes = lambda: spare
        for seed in (1, 2):
            sets.stage(version(seed, num).items())
            sets.stager.flip()
        log = ChangeLog(CPU, 1 << 20) if is_logged else None

        class OnDevice(DeltaWriter):
            def begin(self) -> None:
                self._log = log
                super().begin()
                target = self._new if log is None else log
                self._on_device = DeviceWriter(
                    CPU, self._live, target, self._targets, self._samples
                )

        patch.setattr(loader, "DeltaWriter", OnDevice)
        patch.setattr(
            ChangedElements, "copy", lambda log, *of: copy_elements([log], *of)
        )
        patch.setattr(drift, "_has_kernel", lambda old, new: True)
        patch.setattr(Launches, "run", counted.copies(Launches.run))
        old = version(2, num)
        for seed in range(3):
            new = stepped(old, seed, share=0.05)
            base = sets.stager.served.digest()
            manifest, parts = in_parts(old, new, base, num_parts)
            assert len(manifest.tensors) == num
            counted.counts.clear()
            with counted.running():
                sets.stage(Batches(parts), manifest=manifest)
                if log is not None:
                    flip: Any = Swap(log, parameters_by_name(sets.live))
            if log is not None:
                flip()
                log.clear()
            sets.stager.flip()
            if log is not None:  # the flip of pages has shown the other set
                sets.stager.flip("before")
                held = sets.stager.versions
                sets.stager.versions = held._replace(served=held.before, before=None)
            old = new
    return counted.counts


def check() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    for is_logged in (False, True):
        few, many = (counted(num, is_logged=is_logged) for num in (FEW, MANY))
        assert few["ops"] == many["ops"] <= MOST_OPS
        assert few["reads"] == many["reads"] <= MOST_READS
        assert few["launches"] == many["launches"]
        # One for the part, one for the drift, and one for the last delta's elements.
        assert few["copies"] == many["copies"] == (2 if is_logged else 3)
        assert many["calls"] - few["calls"] <= MOST_CALLS_EACH * (MANY - FEW)


def check_parts() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    for is_logged in (False, True):
        one, three = (
            counted(FEW, is_logged=is_logged, num_parts=num) for num in (1, 3)
        )
        for each in ("reads", "launches", "copies"):
            assert one[each] == three[each], each
        assert three["ops"] - one["ops"] <= MOST_OPS_A_PART * 2
        if is_logged:
            # The log has room for what is decoded, so they are decoded together still.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(writer, "MOST_WITH_ONE_SET", 1)
                again = counted(FEW, is_logged=True, num_parts=3, spare=4)
            assert again["copies"] == one["copies"]
            continue
        # Without room for more than one of them, each part has its own launches.
        for most, spare in ((1, math.inf), (writer.MOST_DECODED, 4)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(writer, "MOST_DECODED", most)
                alone = counted(FEW, is_logged=False, num_parts=3, spare=spare)
            assert alone["copies"] >= one["copies"] + 2, most


@pytest.mark.seconds
def test_parts_that_come_together_take_as_many_launches_as_one():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:check_parts")


@pytest.mark.seconds
def test_a_delta_takes_as_many_calls_for_many_tensors_as_for_few():
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:check")
