"""Modules that a trainer's ranks share out are sent as if they were whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.preloaded_process import run
from tests.support.trainers.sharded import MODELS, WAYS
from vllm.inflight.trainer.sources.stream import tensors

pytestmark = pytest.mark.seconds


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have written what they gathered."""
    folder = tmp_path_factory.mktemp("gathered")
    done = run("tests.support.trainers.sharded", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_module_sharded_over_ranks_is_sent_as_whole_tensors(gathered, name, way):
    found = load_file(gathered / f"{name}-{way}.safetensors")
    expected = dict(tensors(MODELS[name]()))
    assert found.keys() == expected.keys()
    assert "lm_head.weight" not in found and not any("_fsdp" in n for n in found)
    for tensor_name, tensor in expected.items():
        assert torch.equal(found[tensor_name], tensor), tensor_name
