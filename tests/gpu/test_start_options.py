"""On a GPU: what options of a start keep updates out, and which do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_start_options import is_refused
from tests.support.engines.probe import greedy
from vllm.inflight.errors import ConfigError
from vllm.inflight.trainer import Publisher

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
    start: Callable[..., Any], old: Path, new: Path, staging: str
) -> None:
    """`--jit-monitor-mode error` makes vLLM fail at such a kernel."""
    fresh = greedy(start(new))
    log = {"delta_gib": 1.0} if staging == "delta" else {}
    llm = start(
        old,
        jit_monitor_mode="error",
        weight_transfer_config={"backend": "local"},
        additional_config={"inflight": {"staging": staging} | log},
    )
    before = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    weights = load_file(new / "model.safetensors")
    with Publisher(llm, weights) as to:
        assert not to.publish().is_delta
        for tensor in weights.values():
            tensor.view(-1).view(torch.int16)[::100] ^= 1
        assert to.publish().is_delta
    llm.rollback_weights()
    assert greedy(llm) == fresh
    llm.update_weights_from_disk(str(old), "old")
    assert greedy(llm) == before
    assert llm.verify_weights()["result"] == "equal"
