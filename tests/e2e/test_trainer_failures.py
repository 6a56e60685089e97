"""A trainer that dies or stops sending: decoding goes on in every case.

The weights served stay what they were, and the next update, from another trainer,
works. Over gloo here; tests/gpu runs the same over NCCL.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import greedy, prompts
from vllm.inflight.errors import InflightError, TransferFault
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.engine

BUCKET_BYTES = 1 << 16
"""Small, so that half an update is many buckets."""


@pytest.fixture(scope="module")
def backend() -> str:
    return "inflight_gloo"


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path, backend: str) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    transport = WeightTransferConfig(backend=backend)
    inflight = {"stage_share": 1}
    return start(
        old,
        weight_transfer_config=transport,
        additional_config={"inflight": inflight},
    )


@pytest.fixture
def trainer(llm: Any, backend: str) -> Callable[[Path], FarTrainer]:
    def joined(folder: Path) -> FarTrainer:
        return FarTrainer(llm, backend, folder, bucket_bytes=BUCKET_BYTES)

    return joined


class Serving:
    """Streams in this thread, where a CPU engine has to step, while another acts."""

    def __init__(self, llm: Any) -> None:
        self.num_tokens = 0
        self._llm = llm

    def during(self, scene: Callable[[], None]) -> None:
        """Decode until `scene` is over; raises what it raised."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        acting = in_background(scene)
        while not acting.done():
            outputs = self._llm.generate(prompts(4), params, use_tqdm=False)
            self.num_tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
        acting.result()

    def has_decoded(self) -> None:
        """Return once requests have ended that began after it was called."""
        before, ends = self.num_tokens, time.monotonic() + 60
        while self.num_tokens <= before + 160:
            assert time.monotonic() < ends, "no token has come"
            time.sleep(0.01)


def test_a_trainer_killed_in_the_middle_costs_nothing_but_its_update(
    llm: Any, trainer: Any, fresh: list[list[int]], new: Path
) -> None:
    before = greedy(llm)
    serving = Serving(llm)

    def scene() -> None:
        with trainer(new) as far:
            sending = far.fall_silent(new)
            serving.has_decoded()
            assert llm.weight_update_status()["active"]["phase"] == "staging"
            far.kill()
            killed = time.monotonic()
            with pytest.raises(TransferFault):
                sending.result(timeout=60)
            print(f"\nnoticed after {time.monotonic() - killed:.2f} s")
        serving.has_decoded()

    serving.during(scene)
    assert llm.weight_update_status()["active"] is None
    assert greedy(llm) == before
    with trainer(new) as far:
        far.send(new)
    assert greedy(llm) == fresh


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_does_not_wait_for_a_trainer_that_fell_silent(
    llm: Any, trainer: Any, fresh: list[list[int]], new: Path, mode: str
) -> None:
    before = greedy(llm)
    serving = Serving(llm)

    def scene() -> None:
        with trainer(new) as far:
            sending = far.fall_silent(new)
            serving.has_decoded()
            assert llm.pause_generation(mode=mode, flush_cache=False)["paused"]
            active = llm.weight_update_status()["active"]
            assert active["phase"] == "staging", "the pause has waited for its end"
            llm.continue_generation()
            serving.has_decoded()
            llm.abort_weight_update()
            with pytest.raises(InflightError):
                sending.result(timeout=60)
            serving.has_decoded()

    serving.during(scene)
    assert greedy(llm) == before
    with trainer(new) as far:
        far.send(new)
    assert greedy(llm) == fresh
