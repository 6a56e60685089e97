"""Quantised models: processed anew at every update, exchanged as they are served."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

import tests.support.engines.transport  # noqa: F401 (registers the transport "other")
from tests.e2e.test_models import CONFIG
from tests.support.engines.mixtures import mixed, part, said
from tests.support.engines.oracle import differing
from tests.support.engines.probe import NUM_PROMPTS, commits_and_rollbacks, greedy, send
from tests.support.models.quantised import FILE
from vllm.inflight import upstream
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import ReadRows
from vllm.inflight.errors import Malformed, StagingUnavailable, WeightsMismatch
from vllm.inflight.releases.table import holds
from vllm.inflight.worker.model import support
from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.model.kinds.quantized import PROVED
from vllm.inflight.worker.worker_state import WorkerState

pytestmark = pytest.mark.engine

ONLINE = {"quantization": "fp8_per_channel"}
# The CPU build multiplies FP8 slowly, and is warmed up with all the tokens of a step.
COMPILED = {"enforce_eager": False, "max_num_batched_tokens": 256}
WIDE = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's int4 kernel wants AVX-512"
)
FP8_BY_AMX = holds("0.33.0", None) and torch.cpu._is_amx_tile_supported()
FP8_KERNEL = (
    "CPUFp8ChannelWiseScaledMMLinearKernel"
    if FP8_BY_AMX
    else "ChannelWiseTorchFP8ScaledMMLinearKernel"
)
"""What vLLM multiplies FP8 weights with a scale per output with, on this CPU."""
SCALE = "model.layers.1.mlp.down_proj.weight_scale"
WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def int8(checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return checkpoint(0, "int8"), checkpoint(1, "int8")


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], int8: tuple[Path, Path]) -> Any:
    """An engine on the old int8 weights, with a transport of somebody else."""
    transfer = WeightTransferConfig(backend="other")
    return start(int8[0], weight_transfer_config=transfer)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("int8", {}),
        pytest.param("int8", COMPILED, marks=pytest.mark.slow),
        pytest.param("fp8-channel", {}),
        pytest.param("fp8-channel", COMPILED, marks=pytest.mark.slow),
        pytest.param(None, ONLINE),
        pytest.param(None, ONLINE | COMPILED, marks=pytest.mark.slow),
        pytest.param("int4", {}, marks=WIDE),
        pytest.param("int4", COMPILED, marks=(WIDE, pytest.mark.slow)),
    ],
    ids=[
        f"{kind}{how}"
        for kind in ("int8", "fp8", "fp8-online", "int4")
        for how in ("", "-compiled")
    ],
)
def test_quantised_weights_equal_a_fresh_engine_after_every_commit_and_rollback(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    kind: str | None,
    options: dict[str, Any],
) -> None:
    old, new = checkpoint(0, kind), checkpoint(1, kind)
    fresh = greedy(start(new, **options))
    llm = start(old, **options)
    commits_and_rollbacks(llm, old, new, fresh)
    # Compiled steps copy back what these kernels read, and nothing else.
    by_amx = {"int4"} if torch.cpu._is_amx_tile_supported() else set()
    by_amx |= {"fp8-channel", None} if FP8_BY_AMX else set()
    is_copied = kind in by_amx and COMPILED.items() <= options.items()
    assert copied_back(llm) == (quantised_in(llm) if is_copied else set())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("int8", {}),
        pytest.param("fp8-channel", {}, marks=pytest.mark.slow),
        pytest.param(None, ONLINE, marks=pytest.mark.slow),
        pytest.param("int4", {}, marks=(WIDE, pytest.mark.slow)),
    ],
    ids=["int8", "fp8", "fp8-online", "int4"],
)
def test_biases_beside_quantised_weights_are_updated_with_them(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    kind: str | None,
    options: dict[str, Any],
) -> None:
    old, new = (checkpoint(seed, kind, family="qwen2") for seed in (0, 1))
    fresh = greedy(start(new, **options))
    commits_and_rollbacks(start(old, **options), old, new, fresh)


def test_scales_of_activations_and_kernels_that_were_not_tried_are_rejected_by_name(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    static = checkpoint(0, "int8-static")
    llm = start(static)
    layer = r"layer model\.layers\.0\.self_attn\.qkv_proj"
    with pytest.raises(StagingUnavailable, match=f"{layer} has scales of activations"):
        llm.update_weights_from_disk(str(static))
    pair = "CompressedTensorsW8A8Fp8", FP8_KERNEL
    monkeypatch.setitem(PROVED, "cpu", PROVED["cpu"] - {pair})
    llm = start(checkpoint(0, "fp8-channel"))
    with pytest.raises(StagingUnavailable, match=f"{layer} quantises .* {pair[1]}"):
        llm.update_weights_from_disk(str(checkpoint(1, "fp8-channel")))
    assert len(greedy(llm)) == NUM_PROMPTS


def test_schemes_with_shared_scales_or_without_proof_are_rejected_on_several_ranks(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = first_quantised(start(checkpoint(0, None), **ONLINE))
    assert quantized.quantized_obstacle(layer, "cpu", 1) is None
    assert "agree on their scales" in str(quantized.quantized_obstacle(layer, "cpu", 2))
    layer = first_quantised(start(checkpoint(0, "int8")))
    assert quantized.quantized_obstacle(layer, "cpu", 2) is None
    monkeypatch.setitem(quantized.PROVED_ON_RANKS, "cpu", set())
    assert quantized.quantized_obstacle(layer, "cpu", 1) is None
    assert "engine of 2 ranks" in str(quantized.quantized_obstacle(layer, "cpu", 2))


@pytest.mark.parametrize(("name", "value"), [("num_bits", 8), ("symmetric", False)])
def test_packed_weights_other_than_symmetric_int4_are_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    facts = {"num_bits": 4, "symmetric": True, "strategy": "group"}
    scheme, kernel = type("CompressedTensorsWNA16", (), facts)(), type("Of", (), {})()
    scheme.kernel = kernel
    layer = SimpleNamespace(scheme=scheme, quant_method=SimpleNamespace())
    pair = type(scheme).__name__, type(kernel).__name__
    monkeypatch.setitem(PROVED, "cuda", {pair})
    assert quantized.quantized_obstacle(layer, "cuda", 1) is None
    setattr(scheme, name, value)
    assert f"has {name}={value}" in str(quantized.quantized_obstacle(layer, "cuda", 1))


@WIDE
def test_checksums_do_not_depend_on_the_order_in_which_tensors_come(
    start: Callable[..., Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Each part of a fused int4 layer brings a shape, and the last one stays."""
    folder = checkpoint(0, "int4", hidden=256)
    llm = start(folder, weight_transfer_config=WeightTransferConfig(backend="local"))
    tensors, fresh = load_file(folder / FILE), said(llm)
    for order in (sorted(tensors), sorted(tensors, reverse=True)):
        update_id = llm.start_weight_update()["update_id"]
        for number, name in enumerate(order):
            save_file({name: tensors[name]}, tmp_path / str(number))
            info = {"path": str(tmp_path / str(number))}
            llm.update_weights(info, update_id=update_id)
        llm.finish_weight_update(update_id=update_id)
        assert said(llm) == fresh
        assert llm.verify_weights()["result"] == "equal"


def copied_back(llm: Any) -> set[str]:
    """Layers with parameters whose version counters do not count."""
    (found,) = llm.collective_rpc(
        lambda w: WorkerState.of(w.worker).tripwire.copied_back
    )
    return {name.rpartition(".")[0] for name in found}


def quantised_in(llm: Any) -> set[str]:
    """The names of quantised layers."""
    (model,) = llm.collective_rpc(lambda worker: worker.get_model())
    return {n for n, layer in model.named_modules() if quantized.is_quantised(layer)}


def first_quantised(llm: Any) -> torch.nn.Module:
    """A layer of what an engine serves."""
    found: list[torch.nn.Module]
    (found,) = llm.collective_rpc(lambda w: quantized.quantised_layers(w.get_model()))
    return found[0]


def test_a_scale_that_is_missing_and_a_weight_of_another_dtype_are_named(
    llm: Any, int8: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = int8
    llm.update_weights_from_disk(str(old), "old")
    before = said(llm)
    tensors = load_file(new / FILE)
    short = {name: t for name, t in tensors.items() if name != SCALE}
    save_file(short, tmp_path / "short.safetensors")
    with pytest.raises(WeightsMismatch, match="missing") as refusal:
        llm.update_weights_from_disk(str(tmp_path / "short.safetensors"))
    assert refusal.value.tensors == [SCALE]
    wide = tensors | {WEIGHT: tensors[WEIGHT].to(torch.int32)}
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(WeightsMismatch, match="is int32, the model's is int8"):
        llm.update_weights_from_disk(str(tmp_path / "wide.safetensors"))
    assert said(llm) == before


@pytest.mark.since("0.32.0")  # before, the layer keeps them as they were sent
def test_scales_of_a_cache_that_is_not_quantised_are_without_effect(
    llm: Any, int8: tuple[Path, Path], tmp_path: Path
) -> None:
    scale = {"model.layers.0.self_attn.attn.k_scale": torch.tensor([0.5])}
    save_file(load_file(int8[0] / FILE) | scale, tmp_path / "scaled.safetensors")
    llm.update_weights_from_disk(str(int8[0]), "old")
    before = said(llm)
    llm.update_weights_from_disk(str(tmp_path / "scaled.safetensors"), "scaled")
    assert said(llm) == before


@pytest.mark.parametrize(
    ("cache", "adapters", "num_ranks", "reason"),
    [
        ("fp8", None, 1, r"layer 1 scales a KV cache of fp8"),
        ("auto", SimpleNamespace(), 1, r"layer 1 is quantised, and adapters"),
        ("auto", None, 2, None),
    ],
)
def test_an_option_that_a_quantised_model_does_not_support_is_named(
    cache: str, adapters: Any, num_ranks: int, reason: str | None
) -> None:
    attention = torch.nn.Module()
    attention.quant_method = upstream.BaseKVCacheMethod(None)
    model = torch.nn.Sequential(torch.nn.Identity(), attention)
    config = CONFIG | {
        "lora_config": adapters,
        "parallel_config": SimpleNamespace(enable_eplb=False, world_size=num_ranks),
        "cache_config": SimpleNamespace(cache_dtype=cache),
    }
    found = support.support_obstacle(model, SimpleNamespace(**config))
    assert found is reason or re.search(reason, found)


def test_a_subset_of_whole_layers_is_processed_and_the_rest_is_carried_over(
    llm: Any, int8: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = int8
    patterns = ("*.down_proj.*",)
    whole = mixed(old, new, patterns, tmp_path / "mixed")
    llm.update_weights_from_disk(str(whole), "mixed")
    expected = said(llm)
    llm.update_weights_from_disk(str(old), "old")
    before = said(llm)
    assert before[0] != expected[0]
    # The other set held the mixture: half of it is behind what is served.
    some = part(new, patterns, tmp_path / "part")
    for _ in range(2):
        llm.update_weights_from_disk(some, "part", subset=patterns)
        assert said(llm) == expected
        llm.rollback_weights()
        assert said(llm) == before
    llm.update_weights_from_disk(some, "part", subset=patterns)
    llm.update_weights_from_disk(str(old), "old")
    assert said(llm) == before


def test_a_subset_of_a_part_of_a_layer_names_the_rest(
    llm: Any, int8: tuple[Path, Path], tmp_path: Path
) -> None:
    before = said(llm)
    patterns = (WEIGHT,)
    some = part(int8[1], patterns, tmp_path / "part")
    with pytest.raises(WeightsMismatch, match="missing") as refusal:
        llm.update_weights_from_disk(some, "part", subset=patterns)
    assert refusal.value.tensors == [SCALE]
    assert said(llm) == before


@pytest.mark.parametrize("name", ["q_proj.weight", "qkv_proj.weight_scale"])
def test_rows_of_a_quantised_layer_are_rejected_by_name(llm: Any, name: str) -> None:
    full = f"model.layers.0.self_attn.{name}"
    with pytest.raises(Malformed, match=rf"{name}.*quantised layer.*checksums"):
        run_sync(control_of(llm).ask(ReadRows(full, 2)))


def test_the_oracle_finds_a_weight_that_only_its_kernel_keeps(
    llm: Any, int8: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = int8
    llm.update_weights_from_disk(str(old), "old")
    other = mixed(old, new, (WEIGHT,), tmp_path / "mixed")
    assert differing(llm, old) == []
    layer = f"0: {WEIGHT.removesuffix('.weight')}"
    found = differing(llm, other)
    assert layer in found
    assert all(name.startswith(layer) for name in found)


def test_packed_weights_that_both_sets_share_are_not_written_to(
    llm: Any, int8: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = int8
    llm.update_weights_from_disk(str(old), "old")
    before = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    llm.rollback_weights()
    norms = part(old, ("*norm.weight",), tmp_path / "norms")
    llm.update_weights_from_disk(norms, "same", subset=("*norm.weight",))
    assert greedy(llm) == before
    llm.start_weight_update()
    send(llm, new)
    assert greedy(llm) == before
    llm.abort_weight_update()
    assert greedy(llm) == before
