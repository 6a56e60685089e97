"""A tiny model that sees: random weights, a processor, and random pictures.

BLIP-2, since vLLM runs it without torchvision, which the CPU set-up leaves out.
"""

from pathlib import Path

import torch
from PIL import Image
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessorPil,
)

from tests.tiny import make_tokenizer

SIDE, PATCH, QUERIES = 28, 14, 4
"""Of a picture and of its parts, in pixels; how many embeddings it becomes."""
TOWER = ("vision_model.*", "qformer.*", "query_tokens")


def make_seeing(folder: Path, seed: int) -> Path:
    """Write a random BLIP-2 in bf16 and its processor into `folder`."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    pictures = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Blip2Processor(pictures, tokenizer, QUERIES).save_pretrained(folder)
    config = Blip2Config(
        text_config={
            "model_type": "opt",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 2048,
            "init_std": 0.3,
            "bos_token_id": tokenizer.eos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        qformer_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "encoder_hidden_size": 128,
            "cross_attention_frequency": 1,
        },
        num_query_tokens=QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Blip2ForConditionalGeneration(config).to(torch.bfloat16)
        for param in model.parameters():
            if param.dim() == 1 or not param.any():
                param.data += 0.2 * torch.randn_like(param)
    model.save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    """A random picture."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (SIDE, SIDE, 3), generator=random, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
