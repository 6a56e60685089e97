"""Speed and size of deltas: `python -m benchmarks.delta`, or `make bench-delta`.

The sweep changes a share of bf16 elements by one or two units in the last place, and
times the search with its coding, the decoding and the application, on one core or on a
GPU. "read" is the time of comparing two equal copies with torch, which reads both
once. Each time is the best of `--repeat` runs; on the CPU it is the thread's own, so
that other load on the machine counts little.

The steps are those of an optimiser: a small model of bf16 weights learns the bytes of
this repository's pages, with AdamW and fp32 master weights. It is trained first, then
goes on from there at each learning rate. Figures are of the last steps of each.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import facts
from vllm.inflight.delta import Encoder, Part, apply, decode
from vllm.inflight.delta.decode import DecodedPart

SHARES = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.25, 1.0)
RATES = (1e-6, 1e-5, 1e-4)
TRAINED_AT = 3e-4
WARM_STEPS = 6
"""Steps at each learning rate before the first that counts: AdamW's moments settle."""

Tensors = dict[str, torch.Tensor]


def sweep(device: torch.device, num_tensors: int, numel: int, repeat: int) -> list[Any]:
    """The figures of every share."""
    torch.manual_seed(0)
    shape = num_tensors, numel
    old = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    same = old.clone()
    whole = old.nbytes

    clock = time.thread_time if device.type == "cpu" else time.perf_counter

    def best(work: Callable[[], Any]) -> tuple[float, Any]:
        seconds, found = math.inf, None
        for _ in range(repeat):
            found = None  # its memory is used again
            _wait(device)
            began = clock()
            found = work()
            _wait(device)
            seconds = min(seconds, clock() - began)
        return seconds, found

    copies = old.view(torch.int64), same.view(torch.int64)
    rows = []
    for share in SHARES:
        new = stepped(old, share)
        pairs = list(zip(old, new, strict=True))
        read_s, _ = best(partial(torch.equal, *copies))
        encode_s, (parts, numbers) = best(partial(encoded, pairs))
        sizes = [numel] * len(numbers)
        for part in parts:
            part.check(sizes, [2] * len(sizes))
        decode_s, decoded = best(partial(decoded_parts, parts))
        target = old.clone()

        began = time.perf_counter()
        for part in decoded:
            for changes in part:
                apply(changes, target[numbers[changes.number]])
        _wait(device)
        apply_s = time.perf_counter() - began  # once: it adds differences
        assert torch.equal(target.view(torch.int16), new.view(torch.int16))
        num = int((old.view(torch.int16) != new.view(torch.int16)).sum())
        num_bytes = sum(part.num_bytes for part in parts)
        rows.append(
            {
                "share": share,
                "changed": num,
                "bytes": num_bytes,
                "bytes_per_change": num_bytes / num,
                "share_of_whole": num_bytes / whole,
                "encode_s": encode_s,
                "decode_s": decode_s,
                "apply_s": apply_s,
                "read_s": read_s,
                "encode_speed_of_read": read_s / encode_s,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def stepped(old: torch.Tensor, share: float) -> torch.Tensor:
    """A share of all elements moves by one or two units in the last place."""
    new = old.clone()
    bits = new.view(-1).view(torch.int16)
    if share < 1:
        num = max(1, round(share * bits.numel()))
        at = torch.randint(bits.numel(), (num,), device=old.device).unique()
        steps = torch.randint(1, 3, at.shape, device=old.device, dtype=torch.int16)
        steps *= 1 - 2 * (steps.roll(1) & 1)
        bits[at] += steps
    else:
        bits += 1
    return new


def encoded(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The parts between these tensors, and which of them have changed."""
    encoder = Encoder()
    parts = [*encoder.add_all(0, pairs), *encoder.finish()]
    return parts, [n for n, has in enumerate(encoder.have_changed) if has]


def decoded_parts(parts: Sequence[Part]) -> list[DecodedPart]:
    """All changes of these parts."""
    return [decode(part) for part in parts]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Training:
    """A small model of bf16 weights, trained with fp32 master weights.

    Args:
        hidden: width of the model.
        num_layers: its layers.

    """

    def __init__(self, hidden: int, num_layers: int) -> None:
        from transformers import AutoModelForCausalLM, Qwen3Config

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=4096,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            head_dim=64,
            tie_word_embeddings=False,
        )
        # Computed in fp32, from weights that are rounded to bf16: a core multiplies
        # fp32 faster, and the weights are those that an engine would serve.
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.master = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
        text = b"".join(page.read_bytes() for page in pages)
        # Pairs of bytes, so that the embedding has rows that are rarely used.
        one, two = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // 2 * 2]
            .view(-1, 2)
            .long()
            .T
        )
        self.tokens = (one * 31 + two) % config.vocab_size

    def begin(self, rate: float) -> None:
        """Go on at this learning rate, with new moments."""
        params = [t.requires_grad_() for t in self.master.values()]
        self.optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=0.01)

    def step(self, batch: int, length: int) -> float:
        """One step; returns the loss."""
        self.round()
        at = torch.randint(len(self.tokens) - length, (batch,))
        tokens = torch.stack([self.tokens[n : n + length] for n in at.tolist()])
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for name, param in self.model.named_parameters():
            self.master[name].grad, param.grad = param.grad, None
        torch.nn.utils.clip_grad_norm_(self.master.values(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def round(self) -> None:
        """Give the model its weights, rounded to bf16."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self.master[name].bfloat16())

    def weights(self) -> Tensors:
        """The weights as they would be served."""
        return {n: t.detach().bfloat16() for n, t in self.master.items()}


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every learning rate."""
    training = Training(options.hidden, options.layers)
    training.begin(TRAINED_AT)
    for number in range(options.train_steps):
        loss = training.step(options.batch, options.length)
        if number % 10 == 0:
            print(f"training: step {number}, loss {loss:.3f}", flush=True)
    trained = {name: t.detach().clone() for name, t in training.master.items()}
    found: dict[str, Any] = {
        "parameters": sum(t.numel() for t in trained.values()),
        "trained_steps": options.train_steps,
        "trained_loss": loss,
    }
    for rate in RATES:
        training.master = {name: t.clone() for name, t in trained.items()}
        training.begin(rate)
        for _ in range(WARM_STEPS):
            training.step(options.batch, options.length)
        measured = []
        for _ in range(options.steps):
            before = training.weights()
            training.step(options.batch, options.length)
            measured.append(compared(before, training.weights()))
        found[f"{rate:g}"] = {
            key: _median([each[key] for each in measured]) for key in measured[0]
        }
        print(rate, json.dumps(found[f"{rate:g}"]), flush=True)
    return found


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    return median(values)


def compared(old: Tensors, new: Tensors) -> dict[str, Any]:
    """What one step has changed, and what its delta costs."""
    by_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    bits, steps_of = 0.0, dict.fromkeys(("1", "2", "3 to 8", "more"), 0)
    for name, tensor in new.items():
        before, now = (
            each.reshape(-1).view(torch.int16) for each in (old[name], tensor)
        )
        places = (before != now).nonzero().squeeze(1)
        counts = by_kind[kind_of(name)]
        counts[0] += len(places)
        counts[1] += len(now)
        gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
        steps_here = (now - before)[places]
        bits += len(places) * (entropy(gaps) + entropy(steps_here))
        sizes = steps_here.int().abs()
        for key, first, last in (("1", 1, 1), ("2", 2, 2), ("3 to 8", 3, 8)):
            steps_of[key] += int(((sizes >= first) & (sizes <= last)).sum())
        steps_of["more"] += int((sizes > 8).sum())
    changed, total = (sum(column) for column in zip(*by_kind.values(), strict=True))
    report: dict[str, Any] = {
        "share": changed / total,
        "share_of_kind": {kind: n / of for kind, (n, of) in by_kind.items()},
        "share_of_steps": {k: n / max(1, changed) for k, n in steps_of.items()},
        "entropy_bytes_per_change": bits / 8 / max(1, changed),
    }
    for name, level in (("plain", None), ("zstd 3", 3)):
        encoder, parts = Encoder(compress=level), list[Part]()
        pairs = [(old[name], tensor) for name, tensor in new.items()]
        parts += [*encoder.add_all(0, pairs), *encoder.finish()]
        size = sum(part.num_bytes for part in parts)
        report[f"{name}, bytes per change"] = size / max(1, changed)
        report[f"{name}, of entropy"] = size / max(1e-9, bits / 8)
        report[f"{name}, of whole"] = size / (2 * total)
    return report


def kind_of(name: str) -> str:
    """Which of the model's parts a tensor belongs to."""
    for kind in ("embed", "lm_head", "norm", "self_attn", "mlp"):
        if kind in name:
            return kind
    return "other"


def entropy(numbers: torch.Tensor) -> float:
    """Bits of each number, if each were coded by how often it comes."""
    if not len(numbers):
        return 0.0
    _, counts = numbers.unique(return_counts=True)
    share = counts.double() / len(numbers)
    return float(-(share * share.log2()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--numel", type=int, default=1 << 23, help="of each tensor")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-steps", action="store_true", help="the sweep alone")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--train-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=5, help="measured at each rate")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    report: dict[str, Any] = {"machine": facts()}
    report["sweep"] = sweep(device, options.tensors, options.numel, options.repeat)
    if not options.no_steps:
        torch.set_num_threads(2)
        report["steps"] = steps(options)
    file = options.out / f"delta-{device.type}.json"
    file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
