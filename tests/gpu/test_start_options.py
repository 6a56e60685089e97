"""On a GPU: what options of a start keep updates out, and which do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_start_options import is_refused
from tests.support.engines.probe import greedy
from tests.support.engines.script import run_script
from vllm.inflight.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

OFFLOADING = {
    "--cpu-offload-gb": {"cpu_offload_gb": 1},
    "--offload-group-size": {"offload_group_size": 2, "offload_num_in_group": 1},
}


@pytest.mark.parametrize("flag", OFFLOADING)
def test_an_offloading_engine_decodes_as_usual_and_rejects_updates(
    start: Callable[..., Any], old: Path, new: Path, flag: str
) -> None:
    plain = greedy(start(old))
    llm = start(old, **OFFLOADING[flag])
    assert greedy(llm) == plain
    assert f"offloaded to the host ({flag})" in is_refused(llm, new)


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("flag", OFFLOADING)
def test_offloading_is_rejected_by_its_flag_if_shadow_weights_were_requested(
    start: Callable[..., Any], old: Path, flag: str, staging: str
) -> None:
    inflight = {"additional_config": {"inflight": {"staging": staging}}}
    with pytest.raises(ConfigError, match=flag):
        start(old, **OFFLOADING[flag], **inflight)


@pytest.mark.parametrize("staging", ["device", "delta"])
def test_no_kernel_of_ours_is_compiled_once_vllm_has_warmed_up(
    old: Path, new: Path, staging: str
) -> None:
    """vLLM warns of each, and with `--jit-monitor-mode error` it fails."""
    room = "tests.support.gpu"
    seen = run_script("compiled", staging, old, new, room=room, spawned=True)
    assert seen == {
        "watched": True,
        "start": [],
        "later": [],
        "is_delta": True,
        "rolled back": True,
        "back": True,
        "verified": "equal",
    }
