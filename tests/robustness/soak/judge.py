"""The judge: spans of every output, and a sample of them replayed without the engine.

A request that lives through updates reads KV of several versions, and after a
retraction other KV than before. The engine tells which (`kv_versions`), so the
replay is exact: each span of KV is computed by the weights that it names.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.robustness.soak.history import History

NOISE = 0.03 if torch.cuda.is_available() else 2e-3
"""Largest difference of log-probabilities between engine and replay, with room.

The replay runs on the CPU. Versions differ by 0.4 and more.
"""

MLP = ".mlp."

Trail = list[tuple[int, int, int]]
"""(first position, end, epoch) of the KV that a token attended to."""


@dataclass(slots=True)
class Era:
    """Tokens that were sampled on one cache: until a retraction, or the end."""

    begin: int
    first: int
    """Tokens there were at its first chunk; those from `begin` on came with it."""
    end: int
    trail: Trail


@dataclass(slots=True)
class Answer:
    """All that a client has seen of one request."""

    name: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int, str]] = field(default_factory=list)
    """(first token, end, epoch, label)."""
    eras: list[Era] = field(default_factory=list)

    def take(self, choice: Any) -> None:
        """Keep what a chunk says; chunks are cumulative."""
        seen = len(self.tokens)
        self.tokens = list(choice.token_ids)
        self.spans = [
            (s.start, s.end, s.epoch, s.version) for s in choice.weight_versions
        ]
        if choice.logprobs is None or not self.tokens:
            return
        count = len(self.tokens)
        self.logprobs = [
            at[token].logprob
            for at, token in zip(choice.logprobs, self.tokens, strict=True)
        ]
        trail = [(s.start, s.end, s.epoch) for s in choice.kv_versions]
        if self.eras and cut(trail, self.eras[-1].trail[-1][1]) == self.eras[-1].trail:
            self.eras[-1].trail, self.eras[-1].end = trail, count
        else:
            self.eras.append(Era(seen, count, count, trail))

    @property
    def epochs(self) -> list[int]:
        """Of every token."""
        return [epoch for start, end, epoch, _ in self.spans for _ in range(start, end)]


def cut(trail: Trail, end: int) -> Trail:
    """What a trail says of the positions [0, `end`)."""
    return [(s, min(e, end), epoch) for s, e, epoch in trail if s < end]


def covered(answer: Answer, history: History) -> str | None:
    """What is wrong with the spans of an answer; None if nothing is."""
    position, last = 0, -1
    for start, end, epoch, label in answer.spans:
        if start != position or end <= start:
            return f"spans leave a hole or overlap at {start}: {answer.spans}"
        if epoch <= last:
            return f"epoch {epoch} follows {last}"
        if epoch not in history.epochs:
            return f"epoch {epoch} has never been served"
        if history.epochs[epoch].label != label:
            return f"epoch {epoch} is called {label!r}"
        position, last = end, epoch
    if position != len(answer.tokens):
        return f"spans cover {position} of {len(answer.tokens)} tokens"
    return None


class Judge:
    """Plain forwards of every mixture of the checkpoints."""

    def __init__(self, folders: Mapping[str, Path], history: History) -> None:
        self._history = history
        self._models: dict[str, Any] = {}
        whole = {
            name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for name, path in folders.items()
        }
        for base, mlp in product(folders, folders):
            model = copy.deepcopy(whole[base])
            mlps = {n: t for n, t in whole[mlp].state_dict().items() if MLP in n}
            model.load_state_dict(mlps, strict=False)
            self._models[base + mlp] = model
        self.num_answers = self.num_tokens = 0

    def torn(self, answer: Answer) -> list[str]:
        """Tokens that are not of the weights and the KV that they are said to be of."""
        epochs, wrong = answer.epochs, []
        before: Era | None = None
        for era in answer.eras:
            found = self._mismatches(answer, epochs, era.trail, era.begin, era.end)
            if found and before is not None:
                # Sampled before the retraction, and delivered with what came after.
                tail: Trail = [
                    (at, at + 1, epochs[at + 1 - len(answer.prompt)])
                    for at in range(
                        len(answer.prompt) + era.begin - 1,
                        len(answer.prompt) + era.first - 1,
                    )
                ]
                other = self._mismatches(
                    answer, epochs, before.trail + tail, era.begin, era.first
                )
                found = {i: w for i, w in found.items() if i in other or i >= era.first}
            wrong += found.values()
            before = era
        self.num_answers += 1
        self.num_tokens += len(answer.tokens)
        return [f"{answer.name}: {what}" for what in wrong]

    def _mismatches(
        self, answer: Answer, epochs: list[int], trail: Trail, begin: int, end: int
    ) -> dict[int, str]:
        wrong: dict[int, str] = {}
        for index, epoch, logprobs in self._replay(answer, trail):
            if not begin <= index < end:
                continue
            token, got = answer.tokens[index], answer.logprobs[index]
            if epochs[index] != epoch:
                wrong[index] = (
                    f"token {index}: KV of {epoch}, sampled by {epochs[index]}"
                )
            elif not abs(logprobs[token].item() - got) < NOISE:
                wrong[index] = (
                    f"token {index} of {len(answer.tokens)} is not of epoch {epoch}: "
                    f"{got:.4f}, replayed {logprobs[token].item():.4f}; KV {trail}"
                )
        return wrong

    @torch.inference_mode()
    def _replay(
        self, answer: Answer, trail: Trail
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(token, epoch, log-probabilities there) along a trail."""
        text: Sequence[int] = answer.prompt + answer.tokens
        cache = DynamicCache()
        for start, end, epoch in trail:
            model = self._models[self._history.epochs[epoch].content]
            ids = torch.tensor([text[start:end]])
            logits = model(ids, past_key_values=cache, use_cache=True).logits[0]
            logprobs = logits.float().log_softmax(-1)
            for at in range(max(start, len(answer.prompt) - 1), end):
                yield at + 1 - len(answer.prompt), epoch, logprobs[at - start]
