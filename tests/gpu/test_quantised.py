"""Quantised models under CUDA graphs: which schemes and kernels equal a fresh engine.

What is let through on a GPU is in the table `PROVED`. Here every pair is, and
each case prints those it met; one that passes can be entered there.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.deltas import stepped
from tests.support.engines.probe import (
    commits_and_rollbacks,
    flips_under_load,
    greedy,
)
from tests.support.gpu.admission import Admitted
from tests.support.models.quantised import FILE, quantise
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.trainer import Publisher
from vllm.inflight.worker.model.kinds import quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 1024, "layers": 4}
SCALE = "model.layers.3.mlp.down_proj.weight_scale"
KINDS = [
    (None, "fp8"),
    (None, "fp8_per_channel"),
    (None, "fp8_per_block"),
    ("fp8-tensor", None),
    ("fp8-channel", None),
    ("fp8-block", None),
    ("int8", None),
    ("int4", None),
    ("int4-wide", None),
]
"""Checkpoints, and what an engine makes of one in bf16 by itself."""


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Admitted]:
    table = Admitted()
    monkeypatch.setitem(quantized.PROVED, "cuda", table)
    yield table
    print(table)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Callable[[int, str | None], Path]:
    def make(seed: int, kind: str | None) -> Path:
        plain = checkpoint(seed, **SHAPE)
        return plain if kind is None else quantise(plain, Path(f"{plain}-{kind}"), kind)

    return make


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(("kind", "quantization"), KINDS, ids=lambda value: str(value))
def test_quantised_weights_equal_a_fresh_engine_after_every_commit_and_rollback(
    start: Callable[..., Any],
    folder: Callable[[int, str | None], Path],
    admitted: Admitted,
    kind: str | None,
    quantization: str | None,
    is_eager: bool,
) -> None:
    old, new = folder(0, kind), folder(1, kind)
    options = {"enforce_eager": is_eager, "quantization": quantization}
    fresh = greedy(start(new, **options))
    llm = start(old, **options, additional_config={"inflight": {"staging": "device"}})
    commits_and_rollbacks(llm, old, new, fresh)


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(("kind", "quantization"), KINDS, ids=lambda value: str(value))
def test_quantised_weights_equal_a_fresh_engine_with_delta_staging(
    start: Callable[..., Any],
    folder: Callable[[int, str | None], Path],
    admitted: Admitted,
    kind: str | None,
    quantization: str | None,
    is_eager: bool,
) -> None:
    old, new = folder(0, kind), folder(1, kind)
    options = {"enforce_eager": is_eager, "quantization": quantization}
    fresh = greedy(start(new, **options))
    inflight = {"staging": "delta", "delta_gib": 1}
    llm = start(old, **options, additional_config={"inflight": inflight})
    commits_and_rollbacks(llm, old, new, fresh)
    assert llm.verify_weights()["result"] == "equal"


def test_quantised_weights_flip_under_load_and_a_missing_scale_is_rejected(
    start: Callable[..., Any],
    folder: Callable[[int, str | None], Path],
    admitted: Admitted,
    tmp_path: Path,
) -> None:
    old, new = folder(0, "fp8-channel"), folder(1, "fp8-channel")
    fresh = greedy(start(new, enforce_eager=False))
    llm = start(old, enforce_eager=False)
    flips_under_load(llm, (new, old), 20)
    llm.reset_prefix_cache()  # FP8 is not the same to the bit in pieces
    before = greedy(llm)
    llm.reset_prefix_cache()
    short = {n: t for n, t in load_file(new / FILE).items() if n != SCALE}
    save_file(short, tmp_path / FILE)
    with pytest.raises(WeightsMismatch, match="missing") as refusal:
        llm.update_weights_from_disk(str(tmp_path / FILE))
    assert refusal.value.tensors == [SCALE]
    assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh


@pytest.mark.parametrize("staging", ["device", "delta"])
@pytest.mark.parametrize("kind", ["fp8-tensor", "int4", "int4-wide"])
def test_a_delta_of_what_a_kernel_reads_in_another_form_is_followed_by_the_whole(
    start: Callable[..., Any],
    folder: Callable[[int, str | None], Path],
    admitted: Admitted,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    staging: str,
) -> None:
    old = folder(0, kind)
    llm = start(
        old,
        enforce_eager=False,
        weight_transfer_config=WeightTransferConfig(backend="local"),
        additional_config={"inflight": {"staging": staging, "delta_gib": 1}},
    )
    weights = load_file(old / FILE)
    changed = stepped(weights, 1)
    with Publisher(llm, weights, delta="always") as to:
        to.publish("whole")
        before = greedy(llm)
        for name in weights:
            if "q_proj" in name:  # of a fused layer
                weights[name].copy_(changed[name])
        assert not to.publish("a fused layer").is_delta
    assert "of its quantised layer" in caplog.text
    after = greedy(llm)
    for expected in (before, after):
        llm.rollback_weights()
        assert greedy(llm) == expected
