"""A tiny model that sees: random weights, a processor, and random pictures."""

from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.models.seeing import SEEING
from tests.support.models.tiny import common_fields, draw_wide, make_tokenizer

FILE = "model.safetensors"


def make_seeing(folder: Path, seed: int, name: str = "blip2") -> Path:
    """Write a random model in bf16 and its processor into `folder`."""
    seeing = SEEING[name]
    tokenizer = make_tokenizer(seeing.named)
    tokenizer.add_tokens([*seeing.tokens.values()], special_tokens=True)
    seeing.processor(tokenizer).save_pretrained(folder)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = seeing.make(tokenizer, **common_fields(tokenizer))
        model = draw_wide(model.to(torch.bfloat16))
    model.save_pretrained(folder)
    tensors = seeing.publish(load_file(folder / FILE))
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def picture(seed: int, side: int) -> Image.Image:
    """A random picture."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (side, side, 3), generator=random, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
