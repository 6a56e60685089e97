"""A language model so small that a CPU trains it on a sentence in seconds.

python -m examples.tiny_model FOLDER [SEED]    # just its checkpoint, to serve
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

# Before vLLM is imported: 1 GiB of KV cache is plenty here, and no hub is needed.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SENTENCE = "weights change while tokens flow, "
PROMPT = "weights "
SYMBOLS = (
    "Ġ,.!?-abcdefghijklmnopqrstuvwxyz"  # Ġ is how tokenizers of bytes spell a space
)
MAX_LENGTH = 512
ROW = 96
LEARNING_RATE = 2e-3


def make_checkpoint(folder: str | Path, seed: int = 0) -> Any:
    """Write a random model and its tokenizer; returns the module to train."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(SYMBOLS),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    return model


class Trainer:
    """Trains a model of `make_checkpoint` to repeat one sentence."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.step = 0
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        text = SENTENCE.replace(" ", "Ġ") * (2 * ROW // len(SENTENCE) + 1)
        self._tokens = torch.tensor([SYMBOLS.index(symbol) for symbol in text])

    def train(self, num_steps: int) -> float:
        """Take optimiser steps; returns the last loss, in nats per letter."""
        loss = torch.tensor(0.0)
        for _ in range(num_steps):
            starts = torch.randint(len(self._tokens) - ROW, (4,))
            rows = torch.stack([self._tokens[s : s + ROW] for s in starts])
            rows = rows.to(self.model.device)
            loss = self.model(input_ids=rows, labels=rows).loss
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.step += 1
        return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_model", description="Write a model to serve."
    )
    parser.add_argument("folder", metavar="FOLDER", help="where to write it")
    parser.add_argument(
        "seed", metavar="SEED", nargs="?", type=int, default=0, help="of its weights"
    )
    make_checkpoint(**vars(parser.parse_args()))
