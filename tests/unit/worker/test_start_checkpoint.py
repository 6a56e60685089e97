"""The tensors of the checkpoint that an engine started from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint


def config_of(folder: Path, drafting: Any) -> Any:
    model = SimpleNamespace(model=str(folder), hf_overrides=None)
    loading = SimpleNamespace(load_format="auto", download_dir=None)
    return SimpleNamespace(
        model_config=model, load_config=loading, speculative_config=drafting
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [("mtp", {"model.norm"}), ("eagle3", {"model.norm", "draft.model.norm"})],
)
def test_tensors_of_a_drafter_have_names_of_their_own_only_in_a_checkpoint_of_its_own(
    tmp_path: Path, method: str, expected: set[str]
) -> None:
    save_file({"model.norm": torch.ones(2)}, tmp_path / "model.safetensors")
    drafter = SimpleNamespace(model=str(tmp_path), revision=None)
    drafting = SimpleNamespace(method=method, draft_model_config=drafter)
    found = StartCheckpoint.of(config_of(tmp_path, drafting))
    assert found.known.keys() == expected
