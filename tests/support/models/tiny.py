"""Tiny models: random weights and a tokenizer of bytes, made on the spot.

Nothing is downloaded. The weights are drawn wide, so that two seeds disagree
about nearly every token, and token `b` of the tokenizer is byte `b`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models.families import FAMILIES
from tests.support.models.family import HEAD_DIM

SPECIALS = ("<|endoftext|>", "<|start|>", "<|end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def make_checkpoint(
    folder: Path,
    seed: int,
    *,
    family: str = "qwen3",
    tied: bool = False,
    layers: int = 2,
    hidden: int = 128,
    vocab: int | None = None,
    positions: int = 2048,
) -> Path:
    """Write a random model in bf16 and its tokenizer into `folder`.

    Args:
        positions: how long a text may be, in tokens.
        vocab: rows of the embedding; at least, and by default, the tokenizer's.

    """
    tokenizer = make_tokenizer()
    fields = common_fields(
        tokenizer,
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        tied=tied,
        positions=positions,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = draw_wide(FAMILIES[family].make(**fields).to(torch.bfloat16))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def common_fields(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 128,
    layers: int = 2,
    vocab: int | None = None,
    tied: bool = False,
    positions: int = 2048,
) -> dict[str, Any]:
    """What the configurations of tiny models have in common."""
    heads = hidden // HEAD_DIM
    return dict(
        vocab_size=vocab or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=HEAD_DIM,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def draw_wide(model: torch.nn.Module) -> Any:
    """Move what every new model begins with: norms are ones, biases zeros."""
    for param in (*model.parameters(), *filled_buffers(model)):
        if param.dim() == 1 or not param.any():
            param.data += 0.2 * torch.randn_like(param)
    return model


def filled_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers of a model that are numbers and in its checkpoint."""
    kept = model.state_dict()
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name in kept and buffer.is_floating_point()
    ]


def make_tokenizer(named: Mapping[str, str] | None = None) -> PreTrainedTokenizerFast:
    """256 bytes, then `SPECIALS`, and a chat template.

    Args:
        named: more of them, by the attributes that they are to be found under.

    """
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[0],
        pad_token=SPECIALS[3],
        model_max_length=2048,
        extra_special_tokens=dict(named or {}),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for a byte → that byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(256 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
