"""The alphabet of the demo's model: token `b` is byte `b`, and one token ends.

Nothing here needs torch, so the processes that only read streams stay light.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

END = 256
PAD = 257
SPECIALS = ("<|end|>", "<|pad|>")
VOCABULARY = 320
"""Rows of the embedding: bytes and specials, up to a multiple of 64."""


def encode(text: str) -> list[int]:
    """The tokens of `text`, without an end."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str | None:
    """The text of an answer; None if it is unfinished or not all bytes."""
    ends = [place for place, token in enumerate(tokens) if token >= END]
    if ends != [len(tokens) - 1] or tokens[-1] != END:
        return None
    return bytes(tokens[:-1]).decode(errors="replace")


def make_tokenizer() -> Any:
    """The same alphabet as a tokenizer that vLLM and transformers load."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_letters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    end, pad = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=pad
    )


def _letters() -> dict[str, int]:
    """Byte-level BPE writes a byte as itself if that can be seen, else above 255."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(256 + rank): byte for rank, byte in enumerate(hidden)}
    return letters | {chr(byte): byte for byte in visible}
