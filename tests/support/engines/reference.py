"""The reference: a plain transformers forward that replays a stream.

A stream that lives through a commit keeps the KV that the old weights computed,
so its reference is replayed span by span on one cache: the prompt and the
tokens of the first span through the weights of that span, then the tokens of
the next one through the next weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Reference:
    """Plain forwards of several versions of one model."""

    def __init__(self, versions: Mapping[str, Path], dtype: torch.dtype) -> None:
        # For models this small a second thread only waits for the first. (vLLM's
        # CPU worker has put a warning in the place of torch.set_num_threads.)
        torch._C.set_num_threads(1)
        self.models = {
            label: AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
            for label, path in versions.items()
        }

    @torch.inference_mode()
    def replay(
        self, prompt: Sequence[int], tokens: Sequence[int], labels: Sequence[str]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Log-probabilities [vocabulary] of each step, under every version.

        `labels[i]` is the version that sampled `tokens[i]`; the cache goes on
        with what that version computed.
        """
        cache = DynamicCache()
        start = 0
        while start < len(tokens):
            label = labels[start]
            end = start
            while end < len(tokens) and labels[end] == label:
                end += 1
            # A step reads the token before the one it samples.
            read = list(prompt) if start == 0 else [tokens[start - 1]]
            read += tokens[start : end - 1]
            length = cache.get_seq_length()
            logprobs = {}
            # The version of the span last, so that its KV is what stays.
            for name in (*(n for n in self.models if n != label), label):
                branch = cache
                if length:
                    branch.crop(length - branch.get_seq_length())
                else:
                    branch = DynamicCache()
                logits = self.models[name](
                    torch.tensor([read]), past_key_values=branch, use_cache=True
                ).logits[0, start - end :]
                logprobs[name] = logits.float().log_softmax(-1)
            cache = branch
            for index in range(end - start):
                yield {name: values[index] for name, values in logprobs.items()}
            start = end


NOISE = 1e-3
"""By which log-probabilities of two implementations differ in float32. Of two tokens
that are as likely, either may be sampled."""


def unlikely(
    reference: Reference, life: Mapping[str, Any], mode: str
) -> list[tuple[int, int]]:
    """Tokens in a life of matrix.py that a fresh engine would not have sampled.

    Each is a request's number and the token's place. After `in_place` a fresh engine
    would have gone on from the KV of the version before; after `retract` from none.
    """
    found = []
    for number, prompt in enumerate(life["prompts"]):
        tokens, spans = life["told"][number]
        ends = [span["end"] for span in spans]
        assert ends[-1] == len(tokens)
        starts = [0, *ends[:-1]] if mode == "retract" else [0]
        labels = [
            span["version"] for span in spans for _ in range(span["start"], span["end"])
        ]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            said, by = tokens[start:end], labels[start:end]
            steps = reference.replay(prompt + tokens[:start], said, by)
            found += [
                (number, start + place)
                for place, (logprobs, label) in enumerate(zip(steps, by, strict=True))
                if logprobs[label].max() - logprobs[label][said[place]] > NOISE
            ]
    return found


def labels_of(output: Any) -> list[str]:
    """The version of every token of a completion, from its spans."""
    labels: list[str] = []
    for span in output.weight_versions:
        assert span.start == len(labels), "spans leave a hole or overlap"
        labels += [span.version] * (span.end - span.start)
    assert len(labels) == len(output.token_ids), "spans do not cover the tokens"
    return labels
