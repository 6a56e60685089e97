"""Another model is rejected, and another spelling of the same model is not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.transformers_utils.config import get_config

from vllm.inflight.errors import Malformed, WeightsMismatch
from vllm.inflight.worker.verify.model_config import (
    require_same_architecture,
    require_same_config,
)

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 260,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 256,
}
LLAMA = QWEN3 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


def written(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def served(folder: Path, config: dict[str, Any], overrides: Any = None) -> Any:
    """What vLLM knows of a model that was started from `config`."""
    live = get_config(str(written(folder, config)), False)
    return SimpleNamespace(
        hf_config=live, hf_overrides=overrides or {}, trust_remote_code=False
    )


@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"torch_dtype": "float32", "eos_token_id": 7, "use_cache": False},
        {"transformers_version": "4.40.0", "_name_or_path": "elsewhere"},
        {"attention_dropout": 0.1, "initializer_range": 1.0, "resid_pdrop": 0.3},
        # vLLM changes these itself: what is served need not be what was read.
        {"tie_word_embeddings": True, "sliding_window": 0, "vocab_size": 999},
        {"auto_map": {"AutoModel": "modeling.Other"}, "num_key_value_heads": None},
        {"a_field_of_a_trainer": "unknown here"},
        {"text_config": 5},  # these models have none
    ],
)
def test_a_configuration_that_changes_no_token_is_accepted(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any]
) -> None:
    live = served(tmp_path / "live", config)
    require_same_config(written(tmp_path / "new", config | change), live)
    require_same_architecture(change, live)


def test_the_spelling_of_older_transformers_is_the_same_model(tmp_path: Path) -> None:
    for config in (QWEN3, LLAMA):
        rope = dict(config["rope_parameters"])
        old = {k: v for k, v in config.items() if k != "rope_parameters"}
        old["rope_theta"] = rope.pop("rope_theta")
        old["rope_scaling"] = rope if len(rope) > 1 else None
        live = served(tmp_path / "live", config)
        require_same_config(written(tmp_path / "new", old), live)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_theta": 1e6, "rope_parameters": None}, "rope_parameters is"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "500000"),
        ({"num_attention_heads": 8}, "num_attention_heads is 4 here and 8 there"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_another_model_is_rejected_by_the_name_of_the_field(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    live = served(tmp_path / "live", QWEN3)
    with pytest.raises(WeightsMismatch, match=named):
        require_same_config(written(tmp_path / "new", QWEN3 | change), live)


def test_a_field_that_an_override_sets_is_not_compared(tmp_path: Path) -> None:
    longer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    live = served(tmp_path / "live", QWEN3 | longer, overrides=longer)
    require_same_config(written(tmp_path / "new", QWEN3), live)

    def lengthen(config: Any) -> Any:
        config.update(longer)
        return config

    live.hf_overrides = lengthen
    require_same_config(written(tmp_path / "new", QWEN3), live)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"num_hidden_layers": 1 << 40, "layer_types": None}, Malformed, r"1.1e\+12"),
        ({"num_hidden_layers": 1}, Malformed, "num_hidden_layers"),
        ({"num_attention_heads": "/etc/passwd"}, Malformed, "num_attention_heads"),
        ({"hidden_size": [128]}, Malformed, "hidden_size"),
        ({"rope_parameters": {"a": []}}, WeightsMismatch, "rope_parameters is"),
        ({"model_type": ["qwen3"]}, WeightsMismatch, "model_type is 'qwen3' here"),
    ],
    ids=str,
)
def test_an_invalid_configuration_is_rejected_by_name(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], named: str
) -> None:
    live = served(tmp_path / "live", QWEN3 | {"layer_types": ["full_attention"] * 2})
    with pytest.raises(error, match=named):
        require_same_architecture(change, live)


def test_a_folder_without_a_configuration_is_accepted_and_a_broken_one_is_named(
    tmp_path: Path,
) -> None:
    live = served(tmp_path / "live", QWEN3)
    require_same_config(tmp_path, live)
    for broken in ("[1]", "{"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(Malformed, match=r"config\.json is no"):
            require_same_config(tmp_path, live)
    with pytest.raises(WeightsMismatch, match="model_type is 'qwen3' here"):
        require_same_config(written(tmp_path, {"model_type": "gpt2"}), live)
