"""The model: a small transformer, made and pre-trained on the spot."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.demo.learning import corpus
from examples.demo.learning.alphabet import END, PAD, VOCABULARY, make_tokenizer

PRETRAIN_STEPS = 220
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
NUM_DEMONSTRATIONS, NUM_TEXTS = 256, 16
TEXT_EVERY = 4
"""One step in so many reads text; the others read demonstrations."""

disable_progress_bar()  # it would be drawn among ours

Progress = Callable[[int, float], None]
"""`progress(step, loss)`, after every step."""


def make_model(seed: int) -> Any:
    """A Qwen3 of about a million parameters, random."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
            use_cache=False,
        )
    )


def pretrain(model: Any, seed: int, steps: int, progress: Progress) -> None:
    """Teach `model` the corpus; it will be fluent and mostly wrong."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
            group["lr"] = LEARNING_RATE * warm_up * max(0.05, 1 - step / steps)
        if step % TEXT_EVERY == TEXT_EVERY - 1:
            rows, first = corpus.texts(rng, NUM_TEXTS), 1
        else:
            rows, first = corpus.demonstrations(rng, NUM_DEMONSTRATIONS)
        tokens = torch.tensor(rows)
        logits = model(tokens[:, :-1]).logits[:, first - 1 :]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, first:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, loss.item())


def save(model: Any, folder: Path) -> Path:
    """Write the checkpoint that server and trainers start from."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """The checkpoint as a module to be trained."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
