"""`vllm-inflight delta` and `apply`: two checkpoints on disk, and what is between."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.deltas import integers, random_bits, scattered, with_changes
from vllm.inflight.cli.main import main
from vllm.inflight.delta import load

SHAPES = {
    "embed": (torch.bfloat16, 5001),
    "norm": (torch.float32, 77),
    "scale": (torch.float8_e4m3fn, 300),
    "steps": (torch.int64, 1),
    "empty": (torch.float16, 0),
    "same": (torch.bfloat16, 4000),
}


def weights(share: float = 0.0) -> dict[str, torch.Tensor]:
    """A version, or the one after it, in which a share of all elements differs."""
    found = {}
    for seed, (name, (dtype, size)) in enumerate(SHAPES.items()):
        tensor = random_bits(dtype, size, seed)
        if share and name != "same":
            tensor = with_changes(tensor, scattered(size, share), most=3)
        found[name] = tensor
    return found


def folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of two files with an index, and files beside them."""
    path.mkdir()
    names = list(tensors)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, own in files.items():
        save_file({n: tensors[n] for n in own}, path / file, {"format": "pt"})
    places = {name: file for file, own in files.items() for name in own}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    (path / "config.json").write_text("{}")
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def assert_equal(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]):
    assert seen.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(integers(seen[name]), integers(tensor)), name


@pytest.fixture
def run(capsys):
    """`run(*words)`: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("compress", [[], ["--compress", "3"]], ids=["plain", "zstd"])
def test_a_delta_of_directories_leads_from_one_to_the_other(run, tmp_path, compress):
    old = folder(tmp_path / "old", weights())
    new = folder(tmp_path / "new", weights(0.02))
    file, out = tmp_path / "step.delta", tmp_path / "out"
    code, told, _ = run("delta", old, new, "-o", file, "--json", *compress)
    made = json.loads(told)
    assert code == 0 and made["tensors"] == len(SHAPES)
    assert 0 < made["changed_elements"] < made["elements"] / 20
    assert made["bytes"] == file.stat().st_size < made["checkpoint_bytes"]
    before = tensors_of(old)
    code, told, _ = run("apply", old, file, "-o", out, "--json")
    assert code == 0 and json.loads(told)["digest"] == made["digest"]
    assert_equal(tensors_of(out), weights(0.02))
    assert_equal(tensors_of(old), before)
    assert {f.name for f in out.iterdir()} == {f.name for f in old.iterdir()}
    with safe_open(out / "model-1.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert {each.name for each in tmp_path.iterdir()} == {
        *("old", "new", "out", "step.delta")
    }


def test_a_delta_of_single_files_says_what_it_has(run, tmp_path):
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file(weights(), old)
    save_file(weights(0.5), new)
    code, told, _ = run("delta", old, new, "-o", tmp_path / "d")
    assert code == 0 and "of 9,379 elements (" in told
    code, told, _ = run("apply", old, tmp_path / "d", "-o", tmp_path / "out")
    assert code == 0 and "as announced" in told
    assert_equal(load_file(tmp_path / "out"), weights(0.5))


def test_where_nothing_has_changed_a_delta_leads_to_the_same(run, tmp_path):
    old = tmp_path / "old.safetensors"
    save_file(weights(), old)
    code, told, _ = run("delta", old, old, "-o", tmp_path / "d", "--json")
    made = json.loads(told)
    assert code == 0 and made["changed_elements"] == made["changed_tensors"] == 0
    assert made["base"] == made["digest"]
    assert run("apply", old, tmp_path / "d", "-o", tmp_path / "out")[0] == 0
    assert_equal(load_file(tmp_path / "out"), weights())


@pytest.fixture
def made(run, tmp_path) -> tuple[Path, Path]:
    """A checkpoint, and the file of a delta that starts from it."""
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file(weights(), old)
    save_file(weights(0.02), new)
    assert run("delta", old, new, "-o", tmp_path / "d")[0] == 0
    return old, tmp_path / "d"


def rejected(run, *words: object) -> str:
    """What a command says that leaves nothing behind."""
    out = Path(str(words[-1]))
    before = {each: each.stat().st_mtime_ns for each in out.parent.iterdir()}
    code, told, said = run(*words)
    assert (code, told) == (1, "")
    after = {each: each.stat().st_mtime_ns for each in out.parent.iterdir()}
    assert after == before
    return said


def test_a_delta_for_another_checkpoint_is_rejected(run, made, tmp_path):
    _, file = made
    said = rejected(
        run, "apply", tmp_path / "new.safetensors", file, "-o", tmp_path / "out"
    )
    assert "starts from the version with digest" in said
    assert "Apply it to the checkpoint that it was made from." in said


@pytest.mark.parametrize("at", [-150, -300])
def test_a_damaged_delta_is_rejected(run, made, tmp_path, at):
    old, file = made
    data = bytearray(file.read_bytes())
    data[at] ^= 2
    file.write_bytes(data)
    said = rejected(run, "apply", old, file, "-o", tmp_path / "out")
    assert "is malformed" in said or "is not the announced one" in said


def test_a_delta_that_leads_elsewhere_than_announced_is_rejected(run, made, tmp_path):
    old, file = made
    target = load(file)[1]["digest"].encode()
    data = file.read_bytes()
    assert data.count(target) == 1
    file.write_bytes(data.replace(target, b"0" * 32))
    said = rejected(run, "apply", old, file, "-o", tmp_path / "out")
    assert "the digest of the whole checkpoint is not the announced one" in said


def test_other_tensors_are_named(run, made, tmp_path):
    old, _ = made
    other = tmp_path / "other.safetensors"
    save_file({n: t for n, t in weights().items() if n != "norm"}, other)
    for pair in ((old, other), (other, old)):
        said = rejected(run, "delta", *pair, "-o", tmp_path / "d2")
        assert "has the tensor 'norm'" in said and "copy NEW whole" in said
    save_file(weights() | {"norm": torch.zeros(7, 11)}, other)
    said = rejected(run, "delta", old, other, "-o", tmp_path / "d2")
    assert "'norm' is [77] float32" in said and "[7, 11] float32" in said


def test_what_is_no_checkpoint_or_no_delta_is_named(run, made, tmp_path):
    old, file = made
    said = rejected(run, "delta", tmp_path / "gone", old, "-o", tmp_path / "d2")
    assert f"there is no checkpoint {tmp_path / 'gone'}" in said
    (tmp_path / "bare").mkdir()
    said = rejected(run, "delta", old, tmp_path / "bare", "-o", tmp_path / "d2")
    assert "holds no .safetensors file" in said
    said = rejected(run, "apply", old, old, "-o", tmp_path / "out")
    assert str(old) in said
    said = rejected(run, "apply", old, tmp_path / "gone", "-o", tmp_path / "out")
    assert "gone cannot be read" in said
    said = rejected(run, "apply", old, file, "-o", file)
    assert f"{file} exists" in said and "give another -o" in said
    said = run("delta", old, old, "-o", tmp_path / "no" / "d2")[2]
    assert f"there is no directory {tmp_path / 'no'}" in said


def test_an_error_as_json_has_code_and_remedy(run, made, tmp_path):
    old, _ = made
    words = ("delta", old, tmp_path / "gone", "-o", tmp_path / "d2", "--json")
    code, told, said = run(*words)
    error = json.loads(told)["error"]
    assert (code, said) == (1, "")
    assert error["code"] == "malformed" and "directory of them" in error["remedy"]


def test_a_terminal_shows_a_bar(run, made, tmp_path, monkeypatch):
    old, file = made
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, told, shown = run("apply", old, file, "-o", tmp_path / "out", "--json")
    assert code == 0 and json.loads(told)
    assert "reading OLD" in shown or "proving" in shown
