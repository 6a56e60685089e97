"""The benchmark of an optimiser's steps counts what it says."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.delta import steps
from benchmarks.delta.changes import compared
from benchmarks.delta.model import SIZES, Size, tokens_of
from benchmarks.delta.quantised import checkpoint


def test_the_text_is_found_again_in_its_tokens() -> None:
    text = "the gap of the update, ünd the rest"
    tokens = tokens_of(text, 256 + 2)
    assert tokens.max() < 258 and (tokens == 256).sum() == 2  # " the"


def test_changes_are_counted_by_kind_and_by_size() -> None:
    old = {"mlp.a_proj": torch.ones(4, 8).bfloat16(), "norm": torch.ones(8).bfloat16()}
    new = {name: tensor.clone() for name, tensor in old.items()}
    bits = new["mlp.a_proj"].view(torch.int16)
    bits[0, 0] += 1
    bits[1, 1] -= 2
    found = compared(old, new)
    assert found["share"] == 2 / 40
    assert found["share_of_kind"] == {"mlp": 2 / 32, "norm": 0}
    assert found["share_of_steps"] == {"1": 0.5, "2": 0.5, "3 to 8": 0, "more": 0}


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.07), ("int8", 0.02)])
def test_a_quantised_checkpoint_is_near_to_its_weights(kind: str, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 300).bfloat16()
    found = checkpoint({"q_proj.weight": weight, "norm.weight": weight}, kind)
    codes, scales = found["q_proj.weight"].float(), found["q_proj.weight_scale"].float()
    assert found.keys() == {"q_proj.weight", "q_proj.weight_scale"}
    if kind == "fp8":
        tall = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scales = tall[:200, :300]
    off = (codes * scales - weight.float()).abs()
    assert bool((off <= most * weight.float().abs() + 0.02).all())


def test_the_steps_of_each_rate_are_reported(monkeypatch, capsys) -> None:
    monkeypatch.setitem(SIZES, "tiny", Size(128, 1, 300))
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    steps.add_options(parser, size="22M", steps=10)
    words = "--size tiny --batch 1 --length 16 --train-steps 2 --rates 1e-6 1e-4"
    found = steps.measured(parser.parse_args([*words.split(), "--coded"]))
    assert {"1e-06", "0.0001"} <= found.keys()
    slow, fast = found["1e-06"], found["0.0001"]
    assert {"apart 1", "apart 8", "fp8", "int8"} <= slow.keys()
    assert slow["apart 1"]["all"]["share"] < fast["apart 1"]["all"]["share"]
    assert slow["apart 1"]["all"]["share"] < slow["apart 8"]["all"]["share"]
    assert len(slow["apart 1"]["shares"]) == 10
    assert slow["apart 1"]["all"]["plain, of whole"] > 0


def test_it_needs_torch_alone(tmp_path: Path) -> None:
    words = "--size 22M --batch 1 --length 8 --train-steps 1 --steps 1 --rates 1e-6"
    code = (
        "import sys; sys.modules['vllm'] = None; sys.modules['transformers'] = None\n"
        "import runpy; runpy.run_module('benchmarks.delta.steps', run_name='__main__')"
    )
    out = tmp_path / "found.json"
    command = [sys.executable, "-c", code, *words.split(), "--out", str(out)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3])
    assert json.loads(out.read_text())["1e-06"]["apart 1"]["all"]["share"] > 0
