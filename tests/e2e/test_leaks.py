"""Two hundred updates leave nothing behind: no memory, thread, file or descriptor."""

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from vllm.config.weight_transfer import WeightTransferConfig

from benchmarks.gpu.memory import held_by
from tests.e2e.conftest import stop
from tests.support.calm.engine_starts import thawed
from tests.support.engines.script import OPTIONS
from tests.support.engines.unpacked import unpacked
from tests.support.shared_memory import names, nothing_came
from vllm.inflight.errors import InflightError, StagingUnavailable
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

MIB = 1 << 20

Record = Callable[[str, object], None]
"""Of pytest's fixture `record_property`."""


@pytest.fixture(autouse=True, scope="module")
def freezing_engines() -> Iterator[None]:
    """Engines freeze what they made, as they do in the process of a user."""
    with thawed():
        yield


def parameters_of(llm: Any) -> list[Any]:
    """Weak references to the model of an engine, its second set and all in them."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    trees = worker.model_runner.get_model(), worker.vllm_inflight.stager.shadow.module
    return [weakref.ref(part) for t in trees for part in (t, *t.parameters())]


@pytest.mark.parametrize(
    ("is_shut_down", "scrub_interval_s"),
    [
        (True, 3600),
        (False, 0),
        pytest.param(True, 0, marks=pytest.mark.slow),
        pytest.param(False, 3600, marks=pytest.mark.slow),
    ],
)
def test_a_dropped_engine_frees_its_weights(
    checkpoint: Callable[..., Path], is_shut_down: bool, scrub_interval_s: float
) -> None:
    from vllm import LLM

    config = {"inflight": {"scrub_interval_s": scrub_interval_s}}
    llm = LLM(str(checkpoint(0)), additional_config=config, **OPTIONS)
    llm.update_weights_from_disk(str(checkpoint(1)), "one")
    llm.collective_rpc("reload_weights")
    parts = parameters_of(llm)
    assert len(parts) >= 40 and all(part() is not None for part in parts)
    if is_shut_down:
        llm.llm_engine.engine_core.shutdown()
    del llm
    stop([])
    after = [LLM(str(checkpoint(1)), **OPTIONS)]
    gc.collect()
    left = [part for part in parts if part() is not None]
    stop(after)
    assert left == []


def held() -> tuple[int, int]:
    """Resident bytes and open descriptors."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps some of what is freed
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds()


def held_on_gpu() -> dict[str, int]:
    """Bytes of the GPU that this process holds, of tensors there, and page-locked ones.

    Nothing where there is no GPU.
    """
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    return {
        "held": held_by({os.getpid()}),
        "tensors": torch.cuda.memory_allocated(),
        "page-locked": torch.cuda.host_memory_stats()["allocated_bytes.current"],
    }


def threads() -> set[threading.Thread]:
    """Those of ours."""
    return {t for t in threading.enumerate() if t.name.startswith("inflight")}


def settle() -> None:
    """Wait until the threads of the last update have ended; what is free goes back."""
    for thread in threads():
        thread.join(timeout=60)
    ctypes.CDLL(None).malloc_trim(0)


def test_memory_threads_and_descriptors_return_after_200_updates(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    folders = [checkpoint(seed, hidden=256) for seed in (0, 1)]
    known, others = names(), threads()
    llm = start(folders[0])
    nothing_came(known)

    def update(count: int) -> None:
        for index in range(count):
            llm.update_weights_from_disk(str(folders[index % 2]))
            if index % 10 == 0:
                with pytest.raises(InflightError):
                    llm.update_weights_from_disk("/nowhere")
        settle()

    update(100)  # allocator and caches find their level
    before = held()

    def growth() -> int:
        resident = held()[0]
        update(200)
        return held()[0] - resident

    one_set = sum(p.stat().st_size for p in folders[0].glob("*.safetensors"))
    # A leak of one version in ten would show as 20 sets, every time. What the allocator
    # holds for threads that are gone comes once, and goes.
    assert any(growth() < 2 * one_set + 8 * MIB for _ in range(3))
    # What earlier tests of this process left may end meanwhile.
    assert held()[1] <= before[1]
    assert threads() <= others


@pytest.mark.slow
@pytest.mark.parametrize("staging", ["auto", "delta"])
def test_memory_is_flat_over_500_deltas(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    staging: str,
    record_property: Record,
) -> None:
    with unpacked():
        folder = checkpoint(0, hidden=256)
        deltas_leave_nothing(start, folder, staging, record_property)


def deltas_leave_nothing(
    start: Callable[..., Any], folder: Path, staging: str, record: Record
) -> None:
    """Send 500 deltas to an engine with this staging, after 100 for a start.

    On a GPU no other process may take memory of that GPU meanwhile.
    """
    inflight = {"staging": staging} | (
        {"delta_gib": 0.05} if staging == "delta" else {}
    )
    config = {"inflight": inflight}
    local = WeightTransferConfig(backend="local")
    known = names()
    llm = start(folder, additional_config=config, weight_transfer_config=local)
    weights = load_file(folder / "model.safetensors")
    with Publisher(llm, weights) as to:
        assert not to.publish().is_delta

        def update(count: int) -> None:
            for number in range(count):
                for tensor in weights.values():
                    tensor.view(-1).view(torch.int16)[number % tensor.numel()] ^= 1
                assert to.publish().is_delta
            settle()

        update(100)  # allocator and caches find their level
        before, threads_before = held(), threads()
        rises, rises_on_gpu = [], []
        for _ in range(5):
            resident, on_gpu = held()[0], held_on_gpu()
            update(100)
            rises.append(held()[0] - resident)
            now = held_on_gpu()
            rises_on_gpu.append({name: now[name] - on_gpu[name] for name in now})
        record("resident_bytes_of_100_deltas", rises)
        record("gpu_bytes_of_100_deltas", rises_on_gpu)
        one_set = sum(tensor.nbytes for tensor in weights.values())
        # A leak of a copy in ten updates would show as ten sets, every time.
        assert min(rises) < one_set / 2 + 4 * MIB
        assert sum(rises) < 5 * one_set + 40 * MIB
        for name in now:  # what is kept of each update shows every time
            assert min(rise[name] for rise in rises_on_gpu) <= 0, name
        assert held()[1] <= before[1]
        assert threads() <= threads_before
    nothing_came(known)


def test_an_engine_that_was_shut_down_asks_its_workers_nothing_more(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its weights were, another engine's of this process may be by now."""
    llm = start(checkpoint(0))
    core = llm.llm_engine.engine_core.engine_core
    core.shutdown()
    asked: list[Any] = []
    kind = type(core.model_executor)
    monkeypatch.setattr(kind, "collective_rpc", lambda *args, **_: asked.append(args))
    with pytest.raises(StagingUnavailable, match="shut down"):
        llm.update_weights_from_disk(str(checkpoint(1)), "late")
    with pytest.raises(StagingUnavailable, match="shut down"):
        llm.verify_weights()
    llm.weight_info()
    assert asked == []
