"""Random checkpoints of one shape: a Qwen3 of 104 million parameters in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, NUM_LAYERS = 768, 3072, 12
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 4, 64
VOCAB = 256  # byte-level, so that no tokenizer is needed
MAX_LEN = 8192
WINDOW = 128  # of attention, so that a step costs the same however long streams are

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 0,
    "rms_norm_eps": 1e-6,
}


def make_checkpoint(folder: Path, seed: int) -> int:
    """Make a checkpoint in `folder` unless it is there; return its weights' bytes."""
    file = folder / "model.safetensors"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        part = file.with_suffix(".part")
        save_file(_tensors(seed), part, metadata={"format": "pt"})
        part.rename(file)  # a run that was interrupted leaves no half of a file
    return file.stat().st_size


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator)
        return (values * columns**-0.5).bfloat16()

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN)}
    for number in range(NUM_LAYERS):
        layer = {
            "input_layernorm": norm(HIDDEN),
            "self_attn.q_proj": matrix(NUM_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.q_norm": norm(HEAD_DIM),
            "self_attn.k_norm": norm(HEAD_DIM),
            "self_attn.o_proj": matrix(HIDDEN, NUM_HEADS * HEAD_DIM),
            "post_attention_layernorm": norm(HIDDEN),
            "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
        }
        for name, tensor in layer.items():
            tensors[f"model.layers.{number}.{name}.weight"] = tensor
    tensors["model.norm.weight"] = norm(HIDDEN)
    tensors["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return tensors


def num_parameters() -> int:
    """Elements of all tensors of a checkpoint."""
    attention = HIDDEN * HEAD_DIM * (2 * NUM_HEADS + 2 * NUM_KV_HEADS)
    norms = 2 * HIDDEN + 2 * HEAD_DIM
    layer = attention + 3 * HIDDEN * INTERMEDIATE + norms
    return NUM_LAYERS * layer + 2 * VOCAB * HIDDEN + HIDDEN
