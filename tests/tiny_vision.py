"""Tiny models that see: random weights, a processor, and random pictures.

Of those that vLLM can import without torchvision, which the CPU set-up leaves out.
"""

from pathlib import Path

import torch
from PIL import Image
from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessorPil,
)

from tests.tiny import make_tokenizer

SIDE, PATCH = 28, 14
"""Of a picture and of its parts, in pixels."""
TOWER = ("vision_tower.*",)


def make_seeing(folder: Path, seed: int) -> Path:
    """Write a random PaliGemma in bf16 and its processor into `folder`."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.add_tokens(["<image>", "\n"], special_tokens=True)
    tokenizer.add_bos_token = False
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    pictures = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    pictures.image_seq_length = (SIDE // PATCH) ** 2
    PaliGemmaProcessor(pictures, tokenizer).save_pretrained(folder)
    config = PaliGemmaConfig(
        text_config={
            "model_type": "gemma",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 2048,
            "initializer_range": 0.3,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        image_token_index=image_id,
        projection_dim=128,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = PaliGemmaForConditionalGeneration(config).to(torch.bfloat16)
        for param in model.parameters():
            if param.dim() == 1:
                param.data += 0.2 * torch.randn_like(param)
        model.get_input_embeddings().weight.data *= 0.05
    model.save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    """A random picture."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (SIDE, SIDE, 3), generator=random, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
