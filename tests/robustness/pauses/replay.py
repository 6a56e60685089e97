"""The oracle: plain forwards that recompute a stream as its spans say it was computed.

Transformers computes the prompt and the tokens with the weights that the spans name.
Where a pause kept the KV, the next version continues on the KV of the version before;
where requests were retracted, it computes all positions anew. Every reported
log-probability has to be that of its version, and not that of another version.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from tests.robustness.pauses.live import Choice, Stream


@dataclass(frozen=True, slots=True)
class Noise:
    """What engine and reference may differ by, in log-probability.

    Attributes:
        largest: of any token.
        usual: of half of the tokens.

    """

    largest: float
    usual: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions [start, end) whose KV one version computed."""

    label: str
    start: int
    end: int


class Replay:
    """Models of all versions.

    Args:
        models: by label; each maps ids and a cache to logits.
        noise: between them and the engine.

    """

    def __init__(self, models: Mapping[str, Any], noise: Noise) -> None:
        torch._C.set_num_threads(1)  # see tests/support/engines/reference.py
        self.models, self.noise = models, noise

    # ---------------------------------------------------------------- forwards
    @torch.inference_mode()
    def logprobs(
        self, tokens: Sequence[int], stretches: Sequence[Stretch]
    ) -> Iterator[tuple[Stretch, dict[str, torch.Tensor]]]:
        """For each stretch, what every version makes of its positions.

        A version that did not compute a stretch continues on the same KV as the one
        that did.
        """
        cache = DynamicCache()
        for stretch in stretches:
            read = torch.tensor([list(tokens[stretch.start : stretch.end])])
            found = {}
            others = [name for name in self.models if name != stretch.label]
            for name in (*others, stretch.label):
                if stretch.start:
                    cache.crop(stretch.start - cache.get_seq_length())
                else:
                    cache = DynamicCache()
                logits = self.models[name](
                    read, past_key_values=cache, use_cache=True
                ).logits[0]
                found[name] = logits.float().log_softmax(-1)
            yield stretch, found

    # ------------------------------------------------------------------ checks
    def wrong(
        self,
        stream: Stream,
        choice: Choice,
        *,
        keeps_kv: bool,
        is_greedy: bool = True,
        allowed: Callable[[int], Sequence[int] | None] = lambda index: None,
    ) -> list[str]:
        """All that is wrong with one choice.

        Args:
            stream: its request.
            choice: what its client has.
            keeps_kv: whether requests kept their KV when the version changed.
            is_greedy: whether each token has to be the best one.
            allowed: which tokens a grammar lets through, by index of the token.

        """
        found = list(choice.broken)
        length = len(stream.prompt)
        tokens = [*stream.prompt, *choice.tokens]
        spans = [(s.version, s.start, s.end) for s in choice.spans]
        if not choice.tokens:
            return found
        phases = [spans] if keeps_kv else [[span] for span in spans]
        for number, phase in enumerate(phases):
            last = number == len(phases) - 1
            end = length + phase[-1][2] - 1
            kv = _stretches(phase, length)
            if last and choice.kv:
                told = [Stretch(s.version, s.start, s.end) for s in choice.kv]
                found += _differs(told, kv, length, keeps_kv)
                kv = told
            assert kv[-1].end == end
            found += self._phase(
                tokens, length, choice, phase[0][1], kv, is_greedy, allowed
            )
        return found

    def prompt_wrong(self, stream: Stream, stretches: Sequence[Stretch]) -> list[str]:
        """What is wrong with the log-probabilities of a prompt."""
        found = []
        gaps: list[float] = []
        apart: list[float] = []
        told = len(stream.prompt_logprobs)
        for stretch, logprobs in self.logprobs(stream.prompt, stretches):
            for position in range(stretch.start, min(stretch.end, told)):
                at = position - stretch.start
                token = stream.prompt[position + 1]
                got = stream.prompt_logprobs[position]
                gaps.append(abs(logprobs[stretch.label][at, token].item() - got))
                rows = {name: values[at] for name, values in logprobs.items()}
                apart.append(_nearest(rows, stretch.label, token, got))
                if gaps[-1] > self.noise.largest:
                    found.append(
                        f"position {position} of the prompt is not of "
                        f"{stretch.label}: off by {gaps[-1]:.4f}"
                    )
        if gaps:
            found += self._judge(gaps, apart, "the prompt")
        return found

    def _phase(
        self,
        tokens: Sequence[int],
        length: int,
        choice: Choice,
        first: int,
        kv: Sequence[Stretch],
        is_greedy: bool,
        allowed: Callable[[int], Sequence[int] | None],
    ) -> list[str]:
        """Tokens from `first` on, whose KV is that of `kv`."""
        found: list[str] = []
        labels = _labels(choice)
        begins = length + first - 1
        gaps: dict[str, list[float]] = {}
        apart: dict[str, list[float]] = {}
        for stretch, logprobs in self.logprobs(tokens, kv):
            for position in range(max(stretch.start, begins), stretch.end):
                index = position + 1 - length
                token, got, label = tokens[position + 1], *_told(choice, labels, index)
                if label != stretch.label:
                    found.append(
                        f"token {index} is stamped {label!r}, but {stretch.label!r} "
                        "computed the step"
                    )
                    continue
                at = position - stretch.start
                rows = {name: values[at] for name, values in logprobs.items()}
                among = allowed(index)
                if among is not None:
                    rows = {name: _among(row, among) for name, row in rows.items()}
                right = rows[label]
                off = abs(right[token].item() - got)
                gaps.setdefault(label, []).append(off)
                apart.setdefault(label, []).append(_nearest(rows, label, token, got))
                if off > self.noise.largest:
                    found.append(f"token {index} is not of {label!r}: off by {off:.4f}")
                if is_greedy:
                    short = right.max().item() - right[token].item()
                    if short > self.noise.largest:
                        found.append(
                            f"token {index} is not what {label!r} says: "
                            f"{short:.4f} below the best"
                        )
        for label in gaps:
            found += self._judge(gaps[label], apart[label], label)
        return found

    def _judge(self, gaps: list[float], apart: list[float], what: str) -> list[str]:
        """Whether many values are near to their version and far from others."""
        found = []
        if (usual := _median(gaps)) > self.noise.usual:
            found.append(f"tokens of {what!r} are off by {usual:.4f} in the middle")
        if len(apart) >= 8 and _median(apart) < 5 * self.noise.usual:
            found.append(f"tokens of {what!r} cannot be told from another version's")
        return found


def _labels(choice: Choice) -> list[str]:
    return [s.version for s in choice.spans for _ in range(s.start, s.end)]


def _told(choice: Choice, labels: list[str], index: int) -> tuple[float, str]:
    return choice.logprobs[index], labels[index]


def _among(row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities as the engine reports them under a grammar.

    The grammar's mask comes before they are taken.
    """
    masked = torch.full_like(row, -torch.inf)
    masked[list(tokens)] = row[list(tokens)]
    return masked.log_softmax(-1)


def _nearest(
    rows: Mapping[str, torch.Tensor], label: str, token: int, got: float
) -> float:
    """How far from what was reported the nearest other version is."""
    others = [row for name, row in rows.items() if name != label]
    return min(abs(row[token].item() - got) for row in others)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _stretches(phase: Sequence[tuple[str, int, int]], length: int) -> list[Stretch]:
    """Which version computed which position, if each step kept the KV before it.

    The step that samples token `i` reads position `length + i - 1`. The first one reads
    all positions before it, too.
    """
    found = []
    start = 0
    for label, _, end in phase:
        found.append(Stretch(label, start, length + end - 1))
        start = length + end - 1
    return [stretch for stretch in found if stretch.end > stretch.start]


def _differs(
    told: list[Stretch], expected: list[Stretch], length: int, keeps_kv: bool
) -> list[str]:
    """What the engine says of its KV beside what the pause's mode makes of it."""
    if told == expected:
        return []
    # A commit may come in the middle of a prompt. Which chunk it met is not known here.
    after = [(s.label, max(s.start, length), s.end) for s in told if s.end > length]
    wanted = [
        (s.label, max(s.start, length), s.end) for s in expected if s.end > length
    ]
    if keeps_kv and after == wanted:
        return []
    return [f"KV is said to be {told}, and is {expected}"]
