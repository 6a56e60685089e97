"""Requests of a LoRA adapter under pauses, run as a script.

Usage: python -m tests.support.engines.adapters MODEL FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.e2e.test_pause_features import GREEDY, MODES, lived, pause, tokens
from tests.support.engines.script import OPTIONS, tell

RANK = 8


def make_adapter(model: Path, folder: Path, seed: int = 0) -> LoRARequest:
    """An adapter of random weights that changes what a model says."""
    shape = json.loads((model / "config.json").read_text())
    hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 64,
        "target_modules": ["q_proj", "embed_tokens", "lm_head"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random)

    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = drawn(RANK, hidden)
        tensors[f"{name}.lora_B.weight"] = drawn(heads, RANK)
    name = "base_model.model.model.embed_tokens"
    tensors[f"{name}.lora_embedding_A"] = drawn(RANK, vocabulary)
    tensors[f"{name}.lora_embedding_B"] = drawn(hidden, RANK) / 100
    tensors["base_model.model.lm_head.lora_A.weight"] = drawn(RANK, hidden) / 100
    tensors["base_model.model.lm_head.lora_B.weight"] = drawn(vocabulary, RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest("adapter", 1, str(folder))


def main(model: str, folder: str) -> None:
    adapter = make_adapter(Path(model), Path(folder))
    llm = LLM(
        model,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=RANK,
        **OPTIONS,
    )
    params = SamplingParams(**GREEDY)
    seen: dict[str, Any] = {
        "without": tokens(lived(llm, params)),
        "alone": tokens(lived(llm, params, lora_request=adapter)),
    }
    for mode in MODES:
        seen[mode] = tokens(lived(llm, params, pause(llm, mode), lora_request=adapter))
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1], sys.argv[2])
