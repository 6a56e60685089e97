"""A trainer on another GPU: received in place, killed, silent; and memory runs short.

One engine, in this process; whatever happens to the trainer, decoding goes on, the
weights served stay what they were, and the next update works.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import checkpoint, start  # noqa: F401 (fixtures)
from tests.engine.probe import greedy, prompts
from tests.gpu.far_trainer import FarTrainer
from vllm.inflight.errors import Cancelled, InflightError, TransferFault
from vllm.inflight.wire.receiver import Incoming

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, one for the trainer"
    ),
]

SHAPE = {"hidden": 1024, "layers": 4, "vocab": 20000}
BUCKET_BYTES = 1 << 20
"""Small, so that the embedding is larger and half an update is many buckets."""


@pytest.fixture(scope="module")
def old(checkpoint: Callable[..., Path]) -> Path:  # noqa: F811
    return checkpoint(0, **SHAPE)


@pytest.fixture(scope="module")
def new(checkpoint: Callable[..., Path]) -> Path:  # noqa: F811
    return checkpoint(1, **SHAPE)


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], new: Path) -> list[list[int]]:  # noqa: F811
    return greedy(start(new, enforce_eager=False))


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:  # noqa: F811
    from vllm.config.weight_transfer import WeightTransferConfig

    transport = WeightTransferConfig(backend="inflight_nccl")
    return start(old, enforce_eager=False, weight_transfer_config=transport)


@pytest.fixture
def llm(engine: Any, old: Path) -> Iterator[Any]:
    engine.update_weights_from_disk(str(old), "old")
    yield engine
    if engine.weight_update_status()["active"] is not None:
        engine.abort_weight_update()


def trainer(llm: Any, folder: Path) -> FarTrainer:
    return FarTrainer(llm, "inflight_nccl", folder, bucket_bytes=BUCKET_BYTES)


class Serving(threading.Thread):
    """Streams, in a thread of their own, until told otherwise."""

    def __init__(self, llm: Any) -> None:
        super().__init__(daemon=True)
        self.num_tokens = 0
        self.longest_s = 0.0
        self._llm = llm
        self._over = threading.Event()
        self.failure: BaseException | None = None

    def __enter__(self) -> "Serving":
        self.start()
        self.has_decoded()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self.join(120)
        assert not self.is_alive(), "decoding hangs"
        assert self.failure is None

    def run(self) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        try:
            while not self._over.is_set():
                began = time.monotonic()
                outputs = self._llm.generate(prompts(4), params, use_tqdm=False)
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.num_tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
        except BaseException as error:
            self.failure = error

    def has_decoded(self) -> None:
        """Return once tokens came that were not there when it was called."""
        before, ends = self.num_tokens, time.monotonic() + 60
        while self.num_tokens <= before + 160:
            assert time.monotonic() < ends, "no token has come"
            time.sleep(0.01)


def test_updates_over_nccl_are_received_in_place_and_equal_a_fresh_engine(
    llm: Any,
    fresh: list[list[int]],
    old: Path,
    new: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: list[str] = []
    into = Incoming.into

    def told(self: Incoming, place: Any) -> None:
        def known(name: str, *form: Any) -> Any:
            found = place(name, *form)
            placed.extend([name] * (found is not None))
            return found

        into(self, known)

    monkeypatch.setattr(Incoming, "into", told)
    before = greedy(llm)
    assert before != fresh
    with trainer(llm, old) as far:
        for folder, expected in ((new, fresh), (old, before)) * 3:
            far.send(folder)
            assert greedy(llm) == expected
            llm.rollback_weights()
            assert greedy(llm) != expected
            far.send(folder)
            assert greedy(llm) == expected
    assert "model.embed_tokens.weight" in placed
    assert "model.layers.3.self_attn.q_proj.weight" in placed


def test_a_trainer_killed_in_the_middle_costs_nothing_but_its_update(
    llm: Any, fresh: list[list[int]], new: Path
) -> None:
    before = greedy(llm)
    with Serving(llm) as serving:
        with trainer(llm, new) as far:
            sending = far.fall_silent(new)
            serving.has_decoded()
            assert llm.weight_update_status()["active"]["phase"] == "staging"
            far.kill()
            killed = time.monotonic()
            with pytest.raises(TransferFault):
                sending.result(timeout=60)
            print(f"\nnoticed after {time.monotonic() - killed:.2f} s")
        serving.has_decoded()
    assert llm.weight_update_status()["active"] is None
    assert greedy(llm) == before
    with trainer(llm, new) as far:
        far.send(new)
    assert greedy(llm) == fresh


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_does_not_wait_for_a_trainer_that_fell_silent(
    llm: Any, fresh: list[list[int]], new: Path, mode: str
) -> None:
    before = greedy(llm)
    with trainer(llm, new) as far:
        with Serving(llm) as serving:
            sending = far.fall_silent(new)
            serving.has_decoded()
            began = time.monotonic()
            assert llm.pause_generation(mode=mode, flush_cache=False)["paused"]
            took = time.monotonic() - began
            print(f"\npaused after {1e3 * took:.1f} ms")
            assert took < 5.0
            llm.continue_generation()
            serving.has_decoded()
            llm.abort_weight_update()
            with pytest.raises((Cancelled, InflightError)):
                sending.result(timeout=60)
            serving.has_decoded()
        assert greedy(llm) == before
    with trainer(llm, new) as far:
        far.send(new)
    assert greedy(llm) == fresh


def test_memory_that_runs_out_while_staging_costs_nothing_but_the_update(
    start: Callable[..., Any],  # noqa: F811
    fresh: list[list[int]],
    old: Path,
    new: Path,
) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    transport = WeightTransferConfig(backend="inflight_nccl")
    llm = start(old, enforce_eager=True, weight_transfer_config=transport)
    before = greedy(llm)
    with trainer(llm, new) as far:
        torch.cuda.empty_cache()
        hoard = []
        for size in (1 << 30, 1 << 26, 1 << 22, 1 << 20):
            while True:
                try:
                    hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
                except torch.OutOfMemoryError:
                    break
        with pytest.raises(InflightError, match="memory") as refusal:
            # Its embedding fits into no bucket, and its place is not known yet.
            far.send(new)
        print(f"\n{refusal.value}")
        assert greedy(llm) == before
    hoard.clear()
    torch.cuda.empty_cache()
    with trainer(llm, new) as far:
        far.send(new)
        assert greedy(llm) == fresh
