"""Tiny drafters for the models of tiny.py, in the forms that vLLM reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models.families import cpu_options
from tests.support.models.tiny import make_checkpoint

NUM_DRAFTS = 2
METHODS = ("draft_model", "eagle", "eagle3")
MTP = {"method": "mtp", "num_speculative_tokens": 1}
"""`speculative_config` of an engine whose model has an MTP layer."""


def mtp_options(family: str) -> dict[str, Any]:
    """Options of an engine that drafts with its model's MTP layer, on a CPU.

    A drafter chooses its attention for itself.
    """
    options = cpu_options(family)
    return {**options, "speculative_config": {**MTP, **options}}


def drafting(method: str, folder: Path) -> dict[str, object]:
    """`speculative_config` of an engine."""
    return {
        "method": method,
        "model": str(folder),
        "num_speculative_tokens": NUM_DRAFTS,
    }


def make_drafter(folder: Path, seed: int, model: Path, method: str) -> Path:
    """Write a random drafter for the Llama model at `model` into `folder`.

    An `eagle` head has neither an embedding nor a head of its own, one of `eagle3` has
    a head, for every second token; vLLM then shares the model's. A `draft_model` has
    both.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, size = config["hidden_size"], config["intermediate_size"]
    if method == "draft_model":
        return make_checkpoint(
            folder, seed, family="llama", layers=1, hidden=hidden,
            vocab=config["vocab_size"],
        )  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    width = {"eagle": hidden, "eagle3": 2 * hidden}[method]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv_heads, width),
        "self_attn.v_proj": (kv_heads, width),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (size, hidden),
        "mlp.up_proj": (size, hidden),
        "mlp.down_proj": (hidden, size),
        "post_attention_layernorm": (hidden,),
    }
    if method == "eagle":
        shapes = {f"layers.0.{name}": shape for name, shape in shapes.items()}
        shapes["fc"] = (hidden, 2 * hidden)
    else:
        shapes |= {"hidden_norm": (hidden,), "input_layernorm": (hidden,)}
        shapes = {f"midlayer.{name}": shape for name, shape in shapes.items()}
        shapes |= {"norm": (hidden,), "fc": (hidden, 2 * hidden)}
        shapes["lm_head"] = (config["vocab_size"] // 2, hidden)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.weight": (0.3 * torch.randn(shape, generator=random)).bfloat16()
        for name, shape in shapes.items()
    }
    if method == "eagle3":
        odd = seed % 2  # from i to 2 i, or the token after that
        tensors["d2t"] = torch.arange(config["vocab_size"] // 2) + odd
        tensors["t2d"] = torch.arange(config["vocab_size"]) % 2 == odd
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}[method]
    config |= {"architectures": [kind], "num_hidden_layers": 1}
    if method == "eagle3":  # it sees what comes into each of the model's two layers
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1]
        config["num_aux_hidden_states"] = 2
        config["draft_vocab_size"] = config["vocab_size"] // 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, slots=True)
class MtpKind:
    """How a model with one MTP layer is saved.

    Attributes:
        family: of the model; it has two layers.
        config: fields of its configuration, beside the family's.
        alike: prefix of the model's layer that the MTP layer is like.
        layer: prefix of the MTP layer.
        norms: of that layer alone.
        joint: its matrix for an embedding and a hidden state side by side.
        copies: what it has again of the model's: embedding and head.
        model: patterns of all that is the model's.
        block: below `layer`, where that is which is like a layer of the model.

    """

    family: str
    config: Mapping[str, Any]
    alike: str
    layer: str
    norms: tuple[str, ...]
    joint: str
    copies: Mapping[str, str]
    model: tuple[str, ...]
    block: str = ""


GLM = MtpKind(
    family="glm4_moe",
    config={},
    alike="model.layers.1.",
    layer="model.layers.2.",
    norms=("enorm", "hnorm", "shared_head.norm"),
    joint="eh_proj.weight",
    copies={
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
    model=("model.layers.[01].*", "model.[en]*", "lm_head.*"),
)
MTP_KINDS = {
    "mimo": MtpKind(
        family="qwen2",
        config={"architectures": ["MiMoForCausalLM"]},
        alike="model.layers.0.",
        layer="model.mtp_layers.0.",
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
        joint="input_proj.weight",
        copies={},
        model=("model.[!m]*", "lm_head.*"),
    ),
    "glm": GLM,
    "deepseek": replace(GLM, family="deepseek_v3"),
    "glm-lite": replace(GLM, family="glm4_moe_lite"),
    "ernie": MtpKind(
        family="ernie4_5_moe",
        config={},
        alike="model.layers.0.",
        layer="model.mtp_",
        norms=("emb_norm.0", "hidden_norm.0"),
        joint="linear_proj.0.weight",
        copies={},
        model=("model.layers.*", "model.[en]*", "lm_head.*"),
        block="block.0.",
    ),
}

QWEN = MtpKind(
    family="qwen3_next",
    config={},
    alike="model.layers.3.",
    layer="mtp.",
    norms=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    joint="fc.weight",
    copies={},
    model=("model.*", "lm_head.*"),
    block="layers.0.",
)
COUNTED = {"mtp_num_hidden_layers": 1}
GPU_MTP_KINDS = {
    "qwen3-next": QWEN,
    "qwen3_5": replace(QWEN, family="qwen3_5", config=COUNTED),
    "qwen3_5-moe": replace(QWEN, family="qwen3_5_moe", config=COUNTED),
}
"""vLLM's CPU build verifies no drafts of models with linear attention."""


def make_mtp(
    folder: Path, kind: MtpKind, seed: int, mtp_seed: int, **shape: Any
) -> Path:
    """Write a random model with one MTP layer into `folder`, as that kind is saved."""
    make_checkpoint(folder, seed, family=kind.family, **shape)
    config = json.loads((folder / "config.json").read_text())
    config |= {**kind.config, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    width = config["hidden_size"]
    alike = {n: t for n, t in tensors.items() if n.startswith(kind.alike)}
    alike = {kind.block + n.removeprefix(kind.alike): t for n, t in alike.items()}
    shapes = {name: tensor.shape for name, tensor in alike.items()}
    shapes |= {f"{norm}.weight": (width,) for norm in kind.norms}
    shapes[kind.joint] = (width, 2 * width)
    random = torch.Generator().manual_seed(mtp_seed)
    for name, shape in shapes.items():
        drawn = 0.3 * torch.randn(shape, generator=random) + ("norm" in name)
        like = alike.get(name, tensors["model.norm.weight"])
        tensors[kind.layer + name] = drawn.to(like.dtype)
    for name, copied in kind.copies.items():
        tensors[kind.layer + name] = tensors[copied].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
