"""Shapes of well-known models, as config.json: random weights need nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "14B": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "tie_word_embeddings": False,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 24,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
"""Those of Qwen3, by its model cards. `70B` has the sizes of Qwen2.5-72B: 145 GB.
`experts` is 30B-A3B with half of its layers: 31 GB in 9,411 tensors. `tiny` tries a
benchmark out."""

RANKS = {"32B": 2, "70B": 4}
"""GPUs of a rank each that an engine takes, where one of 80 GB has no room."""
GIVEN_RANKS = "BENCH_RANKS"
"""In the environment: how many, whatever the shape."""
TRAINER_GPU = "BENCH_TRAINER_GPU"
"""In the environment: the trainer's, if it is not the one after the engine's. With CUDA
IPC it may be one of the engine's."""
TRAINER_RANKS = "BENCH_TRAINER_RANKS"
"""In the environment: processes of the trainer, a GPU each, from its first one on."""
SAVES = "BENCH_TRAINER_SAVES"
"""In the environment: whether a trainer makes a checkpoint of the folder first."""


def num_ranks(folder: str) -> int:
    """GPUs of the engine that serves a shape's folder."""
    return int(os.environ.get(GIVEN_RANKS) or RANKS.get(Path(folder).name, 1))


def num_trainer_ranks() -> int:
    """Processes of the trainer."""
    return int(os.environ.get(TRAINER_RANKS) or 1)


def require_gpus(shape: str) -> list[str]:
    """The names of this host's GPUs; exits if they are too few, and not none."""
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    needed = num_ranks(shape) + (TRAINER_GPU not in os.environ) * num_trainer_ranks()
    if gpus and len(gpus) < needed:
        raise SystemExit(f"{needed} GPUs are needed, here are: {', '.join(gpus)}")
    return gpus


def write_shape(name: str, root: Path) -> Path:
    """A folder of that name that vLLM loads with `load_format="dummy"`."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_QWEN3 | SHAPES[name], indent=1))
    return folder
