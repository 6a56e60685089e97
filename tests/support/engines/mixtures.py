"""Mixtures of two checkpoints: as a folder of their own, and as a subset of one."""

import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import oracle
from tests.support.engines.probe import checksums, commits_and_rollbacks, greedy
from tests.support.models.families import FAMILIES
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import ReadChecksums

FILE = "model.safetensors"

MLP = ("*.mlp.*",)
EMBEDDING = ("model.embed_tokens.weight",)
NORMS = ("*norm.weight",)
HEAD = ("lm_head.weight",)


def declared(folder: Path, patterns: Sequence[str]) -> dict[str, Any]:
    """The tensors of a checkpoint that match one of `patterns`."""
    tensors = load_file(folder / FILE)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def part(new: Path, patterns: Sequence[str], at: Path) -> str:
    """A folder with nothing but the tensors that match."""
    at.mkdir(exist_ok=True)
    save_file(declared(new, patterns), at / FILE)
    return str(at)


def mixed(old: Path, new: Path, patterns: Sequence[str], at: Path) -> Path:
    """The checkpoint `old` with the tensors of `new` that match."""
    shutil.copytree(old, at, dirs_exist_ok=True)
    tensors = load_file(old / FILE) | declared(new, patterns)
    save_file(tensors, at / FILE, metadata={"format": "pt"})
    return at


def said(llm: Any) -> tuple[list[list[int]], dict[str, str]]:
    """Tokens, and the digest of every parameter as decoding uses it."""
    (counts, *_) = run_sync(control_of(llm).ask(ReadChecksums()))
    (rank, *_) = counts["ranks"]
    return greedy(llm), rank["checksums"]


def equals_fresh_engines(
    start: Callable[[Path], Any],
    folders: tuple[Path, Path],
    family: str,
    root: Path,
    *,
    rounds: int,
) -> None:
    """After each of `rounds` of commits and rollbacks, and after a subset of it."""
    odd = FAMILIES[family].odd
    before, after = folders
    llm = start(after)
    expected, whole = greedy(llm), checksums(llm)
    mixture = mixed(before, after, odd, root / "mixed")
    expected_mixture = greedy(start(mixture))
    llm = start(before)
    commits_and_rollbacks(llm, before, after, expected, rounds=rounds)
    llm.update_weights_from_disk(str(after), "after")
    assert checksums(llm) == whole
    oracle.check(llm, after)
    scrubbed(llm)
    llm.rollback_weights()
    some = part(after, odd, root / "part")
    llm.update_weights_from_disk(some, "odd", subset=odd)
    assert greedy(llm) == expected_mixture
    oracle.check(llm, mixture)
    scrubbed(llm)


def scrubbed(llm: Any) -> None:
    """Assert that what is served is what the digest of its label says, all of it."""
    found = llm.verify_weights()
    assert found["result"] == "equal", found
    if found["digest"] is not None:  # of a subset on top of the start nobody knows it
        assert found["num_tensors"] > 0
        computed = [n for n in found["unknown"] if fnmatchcase(n, "*.qkv_proj.weight")]
        if computed and not torch.cuda.is_available():
            # The CPU build packs it. Computed by a loader, it has no digest from
            # staging, but one from the first reading. Nothing else may be unknown.
            assert found["unknown"] == computed, found
            found = llm.verify_weights()
            assert found["result"] == "equal", found
        assert found["unknown"] == [], found


def behind(llm: Any) -> set[str]:
    """The parameters in which the two sets of an engine may differ."""
    (names,) = llm.collective_rpc(lambda w: w.vllm_inflight.stager.shadow.stale)
    return set(names)
