"""A rejected version changes nothing, and the next one works."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines.probe import greedy, send, state
from vllm.inflight.errors import (
    DeadlineExceeded,
    EngineFault,
    InflightError,
    Malformed,
    TransferFault,
    WeightsMismatch,
)
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("faults", "error", "named"),
    [
        ({"skip": ["model.layers.1.self_attn.v_proj.weight"]}, WeightsMismatch, None),
        ({"skip": ["model.layers.0.mlp.down_proj.weight"]}, WeightsMismatch, None),
        ({"skip": ["model.norm.weight"]}, WeightsMismatch, None),
        ({"poison": "model.layers.0.mlp.up_proj.weight"}, WeightsMismatch, None),
        ({"reshape": "model.layers.0.self_attn.o_proj.weight"}, WeightsMismatch, None),
        ({"reshape": "model.embed_tokens.weight"}, WeightsMismatch, None),
        (
            {"rename": {"model.layers.1.mlp.gate_proj.weight": "mlp.gatte.weight"}},
            WeightsMismatch,
            "mlp.gatte.weight",
        ),
        ({"fail_after": 8}, EngineFault, ""),
        ({"fail_after": 0}, EngineFault, ""),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_a_bad_version_changes_nothing_and_the_next_one_works(
    llm: Any,
    new: Path,
    fresh: Any,
    faults: dict[str, Any],
    error: type[InflightError],
    named: str | None,
) -> None:
    before = state(llm)
    llm.start_weight_update(weight_version="bad")
    with pytest.raises(error) as caught:
        send(llm, new, **faults)
        llm.finish_weight_update()
    if named is None:
        named = next(iter(faults.values()))
        named = named[0] if isinstance(named, list) else named
    assert not named or named in caught.value.tensors
    assert state(llm) == before
    llm.start_weight_update()
    send(llm, new)
    llm.finish_weight_update()
    assert greedy(llm) == fresh


def test_an_unknown_name_is_answered_with_the_nearest_ones(llm: Any, new: Path) -> None:
    wrong = {"model.layers.1.mlp.gate_proj.weight": "layers.1.mlp.gate_proj.weight"}
    llm.start_weight_update()
    with pytest.raises(WeightsMismatch, match=r"nearest: model\.layers\.1\.mlp\.gate"):
        send(llm, new, rename=wrong)
        llm.finish_weight_update()


def test_a_publisher_is_told_of_an_engine_that_has_another_backend(
    llm: Any, new: Path
) -> None:
    before = state(llm)
    with (
        Publisher(llm, load_file(new / "model.safetensors")) as publisher,
        pytest.raises(Malformed, match="engine has backend 'other': start"),
    ):
        publisher.publish("new")
    assert state(llm) == before


def test_a_truncated_file_changes_nothing(
    llm: Any, new: Path, tmp_path: Path, fresh: Any
) -> None:
    before = state(llm)
    whole = (new / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Malformed, match="not a whole safetensors file"):
        llm.update_weights_from_disk(str(tmp_path), "cut")
    assert state(llm) == before
    llm.update_weights_from_disk(str(new), "v1")
    assert greedy(llm) == fresh


def test_a_digest_that_differs_from_the_manifests_is_rejected(
    llm: Any, old: Path, new: Path
) -> None:
    from safetensors.torch import load_file

    from vllm.inflight import ops
    from vllm.inflight.update import Manifest, TensorSpec

    tensors = load_file(old / "model.safetensors")
    manifest = Manifest.of(
        TensorSpec(name, tuple(t.shape), "bfloat16", digest.hex())
        for (name, t), digest in zip(
            tensors.items(), ops.digest(list(tensors.values())), strict=True
        )
    ).to_dict()
    before = state(llm)
    with pytest.raises(WeightsMismatch, match="its digest is"):
        llm.update_weights_from_disk(str(new), "lie", manifest=manifest)
    assert state(llm) == before
    assert llm.update_weights_from_disk(str(old), "true", manifest=manifest)["digest"]


def test_a_deadline_ends_a_slow_stage_and_the_next_update_works(
    llm: Any, new: Path, fresh: Any
) -> None:
    before = state(llm)
    with pytest.raises(DeadlineExceeded):
        llm.start_weight_update(deadline_s=0.3)
        send(llm, new, sleep_s=0.1)
    assert state(llm) == before
    llm.update_weights_from_disk(str(new), "v1")
    assert greedy(llm) == fresh


def test_an_aborted_update_leaves_no_trace(llm: Any, new: Path, fresh: Any) -> None:
    before = state(llm)
    llm.start_weight_update(update_id="given-up")
    send(llm, new)
    assert llm.abort_weight_update("given-up")["phase"] == "aborted"
    assert llm.abort_weight_update("given-up")["phase"] == "aborted"
    assert state(llm) == before
    llm.update_weights_from_disk(str(new), "v1")
    assert greedy(llm) == fresh


def test_weights_of_another_model_of_the_same_shapes_are_rejected(
    llm: Any, new: Path, tmp_path: Path, fresh: Any
) -> None:
    before = state(llm)
    for file in new.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((new / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsMismatch, match="rope_parameters is"):
        llm.update_weights_from_disk(str(tmp_path), "other", mode="retract")
    manifest = {"format": 1, "config": {"num_attention_heads": 2}}
    with pytest.raises(WeightsMismatch, match="num_attention_heads is 4 here and 2"):
        llm.update_weights_from_disk(str(new), "other", manifest=manifest)
    assert state(llm) == before
    manifest["config"] = {"num_attention_heads": 4}
    llm.update_weights_from_disk(str(new), "same", manifest=manifest)
    assert greedy(llm) == fresh


# ---------------------------------------- an engine of its own, from here on
def test_a_communicator_that_has_disabled_itself_is_rejected(
    start: Callable[..., Any], old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would receive nothing, and say nothing."""
    from vllm.config.weight_transfer import WeightTransferConfig

    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    transport = WeightTransferConfig(backend="nccl")
    llm = start(old, weight_transfer_config=transport)
    before = state(llm)
    unique = base64.b64encode(bytes(128)).decode()
    info = {"nccl_unique_id_b64": unique, "rank_offset": 1, "world_size": 2}
    with pytest.raises(TransferFault, match="disabled itself"):
        llm.init_weight_transfer_engine({"init_info": info})
    tensor = {"names": ["lm_head.weight"], "dtype_names": ["float32"]}
    llm.start_weight_update()
    with pytest.raises(EngineFault, match="not initialized"):
        llm.update_weights({"update_info": tensor | {"shapes": [[260, 128]]}})
    assert state(llm) == before
