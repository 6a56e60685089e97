"""Vision models on a GPU, eager and with CUDA graphs."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.pictures import commits_rollbacks_and_a_tower
from tests.support.models.seeing import SEEING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", SEEING)
def test_text_and_pictures_equal_a_fresh_engines_after_commits_rollbacks_and_a_tower(
    start: Callable[..., Any], tmp_path: Path, name: str, eager: bool
) -> None:
    if SEEING[name].wants_torchvision and find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    options: dict[str, Any] = {"enforce_eager": eager}
    if name.startswith("qwen3_5"):  # else vLLM takes FlashInfer's, installed or not
        options["additional_config"] = {"gdn_prefill_backend": "triton"}
    commits_rollbacks_and_a_tower(partial(start, **options), tmp_path, name)
