"""Free memory beside one set of weights: delta staging takes a log, and no second set.

Each engine is a process of its own, with as much memory for KV.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.deltas import stepped
from tests.support.engines.script import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 4096, "layers": 10, "vocab": 32000}
BESIDE = {"delta": 0.06, "device": 1.01}
"""Staging → the most that it takes beside the weights, as a share of them."""
KERNELS = 96 << 20
"""Bytes of our kernels on a GPU, and of what allocators round up to."""


@pytest.fixture(scope="module")
def taken(old: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    new = tmp_path_factory.mktemp("new")
    weights = stepped(load_file(old / "model.safetensors"), 1, share=0.01)
    save_file(weights, new / "model.safetensors")
    room = "tests.support.gpu"
    return {
        staging: run_script("memory", staging, old, new, room=room, spawned=True)
        for staging in ("off", *BESIDE)
    }


@pytest.mark.parametrize("moment", ["held", "started", "updated"])
@pytest.mark.parametrize("staging", BESIDE)
def test_an_engine_takes_no_more_beside_its_weights_than_its_staging_needs(
    taken: dict[str, Any], staging: str, moment: str
) -> None:
    """`held` has what torch keeps for itself: nothing of what the proof of the
    destination table has taken."""
    weights = taken["off"]["weights"]
    alone = taken["off"]["held" if moment == "held" else "started"]
    beside = taken[staging][moment] - alone
    print(f"{staging}, {moment}: {beside / weights:.2%} of {weights >> 20} MiB")
    assert beside < BESIDE[staging] * weights + KERNELS
