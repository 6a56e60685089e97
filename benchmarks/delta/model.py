"""A language model in the shape of Qwen3, and the text that it learns; torch alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

HEAD_DIM = 64
NUM_BYTES = 256
"""The first tokens, for text that the vocabulary does not have."""


@dataclass(frozen=True)
class Size:
    """The size of a model."""

    hidden: int
    num_layers: int
    vocab: int


SIZES = {
    "22M": Size(512, 6, 4096),
    "110M": Size(768, 12, 16384),
    "340M": Size(1024, 24, 16384),
    "1.1B": Size(1792, 28, 16384),
}
"""About so many parameters."""


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys, and rotary positions."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        kv = max(1, hidden // (2 * HEAD_DIM)) * HEAD_DIM
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM)
        self.k_norm = nn.RMSNorm(HEAD_DIM)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        heads = (
            part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = heads
        q, k = turned(self.q_norm(q), turns), turned(self.k_norm(k), turns)
        found = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.down_proj = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each with a norm before it and added to its input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = Attention(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = Mlp(hidden)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """The whole model; its head is not tied."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(Layer(size.hidden) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        turns = rotations(tokens.shape[1], tokens.device)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        logits = self.lm_head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rotations(length: int, device: torch.device) -> torch.Tensor:
    """How far each pair of channels is turned at each position."""
    speeds = 1e6 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    return torch.outer(torch.arange(length, device=device), speeds)


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Queries or keys with their positions."""
    one, two = x.chunk(2, -1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def own_text() -> str:
    """The text of this repository: its pages, and its Python files."""
    root = Path(__file__).parents[2]
    files = [*root.glob("docs/*.md"), *root.glob("vllm/inflight/**/*.py")]
    return "\n".join(file.read_text() for file in sorted(files))


def tokens_of(text: str, vocab: int) -> torch.Tensor:
    """The text in tokens: words and signs that are frequent, and bytes for the rest."""
    pieces = re.findall(r" ?\w+|\s+|[^\w\s]", text)
    frequent = [piece for piece, _ in Counter(pieces).most_common(vocab - NUM_BYTES)]
    number = {piece: NUM_BYTES + n for n, piece in enumerate(frequent)}
    found: list[int] = []
    for piece in pieces:
        found += [number[piece]] if piece in number else piece.encode()
    return torch.tensor(found)
