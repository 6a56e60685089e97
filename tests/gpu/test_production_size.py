"""Deltas of a model with 8 billion parameters on a GPU, while 64 requests are decoded.

The trainer has its weights on the same GPU. An element in a hundred changes from one
version to the next, among them in tensors of more than a gigabyte.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.arm import ROLLBACK, VERIFY
from benchmarks.process import arm
from benchmarks.record import Plan, Record
from benchmarks.shapes import SAVES, TRAINER_GPU, write_shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ENGINE = {
    # With so much KV vLLM measures no free memory, which the trainer's process changes.
    "gpu_memory_utilization": 0.6,
    "kv_cache_memory_bytes": 20 << 30,
}
DELTA = "0.01"
SAME_AGAIN = "whole 0"


@pytest.mark.parametrize("staging", ["device", "delta"])
def test_after_fifty_deltas_and_a_rollback_an_8b_model_is_what_a_whole_version_makes_it(
    staging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRAINER_GPU, "0")
    monkeypatch.setenv("BENCH_BACKEND", "inflight_ipc")
    monkeypatch.setenv("BENCH_ENGINE", json.dumps(ENGINE))
    environment = {
        "BENCH_INFLIGHT": json.dumps({"staging": staging, "delta_gib": 3.0}),
        SAVES: "1",  # a log has no room for weights that differ everywhere
    }
    folder, log = write_shape("8B", tmp_path), tmp_path / "log"
    with arm(staging, "benchmarks.gpu.arm", folder, log, environment) as process:

        def play(*kinds: str, are_deltas: bool = True) -> Record:
            record = process.carry_out(Plan(64, 64, 0.2, [*kinds, VERIFY]))
            *updates, verified = record.updates
            assert verified.facts == {"is_equal": True}
            found = [u.facts.get("is_delta", 0.0) for u in updates]
            assert found == [float(kind == DELTA and are_deltas) for kind in kinds]
            return record

        play("whole 0.01")
        # This trainer keeps no version that it sends whole, so the next is whole, too.
        play(DELTA, are_deltas=False)
        for _ in range(4):
            after_chain = play(*[DELTA] * 10)
        play(DELTA)
        assert play(ROLLBACK).probe == after_chain.probe
        after_more = play(*[DELTA] * 9)
        assert play(SAME_AGAIN).probe == after_more.probe
