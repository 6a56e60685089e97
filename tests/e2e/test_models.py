"""Families, tied embeddings and compiled models; what cannot be swapped is named."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig

import tests.support.engines.transport  # noqa: F401 (registers the transport "other")
from tests.support.engines.probe import NUM_PROMPTS, greedy, send
from vllm.inflight.errors import ConfigError, StagingUnavailable
from vllm.inflight.worker.model import support

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"family": "qwen3", "tied": True}, {}),
        ({"family": "llama", "tied": False}, {}),
        ({"family": "llama", "tied": True, "vocab": 300}, {}),
        # Every run compiles it for a history of deltas.
        pytest.param(
            {"family": "qwen3"}, {"enforce_eager": False}, marks=pytest.mark.slow
        ),
    ],
    ids=["qwen3-tied", "llama", "llama-tied-padded-vocabulary", "qwen3-compiled"],
)
def test_every_shape_equals_a_fresh_engine_after_a_commit_and_a_rollback(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    shape: dict[str, Any],
    options: dict[str, Any],
) -> None:
    old, new = checkpoint(0, **shape), checkpoint(1, **shape)
    fresh = greedy(start(new, **options))
    llm = start(old, **options)
    before = greedy(llm)
    assert before != fresh
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == before


def test_a_tied_head_in_the_checkpoint_is_not_a_tensor_too_many(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    old, new = checkpoint(0, tied=True), checkpoint(1, tied=True)
    llm = start(old, weight_transfer_config=WeightTransferConfig(backend="other"))
    llm.start_weight_update()
    send(llm, new, extra={"lm_head.weight": "model.embed_tokens.weight"})
    assert llm.finish_weight_update("new")["weight_version"] == "new"


def test_staging_off_rejects_updates_and_serves(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    inflight = {"staging": "off", "update_deadline_s": 5}
    llm = start(
        checkpoint(0),
        weight_transfer_config=WeightTransferConfig(backend="other"),
        additional_config={"inflight": inflight},
    )
    with pytest.raises(StagingUnavailable, match="off"):
        llm.update_weights_from_disk(str(checkpoint(1)))
    for connect in (
        lambda: llm.init_weight_transfer_engine({"init_info": {}}),
        llm.shutdown_weight_transfer_engine,
    ):
        with pytest.raises(StagingUnavailable, match="off"):
            connect()
    assert len(greedy(llm)) == NUM_PROMPTS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_staging_without_a_gpu_is_rejected_by_name(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    inflight = {"staging": "device"}
    with pytest.raises(ConfigError, match="there is no GPU"):
        start(checkpoint(0), additional_config={"inflight": inflight})


def test_a_bad_knob_is_rejected_before_anything_starts(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="verify must be one of digest, served, off"):
        start(checkpoint(0), additional_config={"inflight": {"verify": "maybe"}})


class Hoarder(torch.nn.Module):
    """A layer that keeps packed weights where no parameter shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = [torch.zeros(4, 4)]


CONFIG = {
    "lora_config": None,
    "speculative_config": None,
    "parallel_config": SimpleNamespace(enable_eplb=False),
    "model_config": SimpleNamespace(enable_sleep_mode=False, quantization=None),
    "device_config": SimpleNamespace(device_type="cpu"),
    "additional_config": {},
}


def test_a_layer_that_hides_weights_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), Hoarder())
    reason = support.support_obstacle(model, SimpleNamespace(**CONFIG))
    assert reason is not None
    assert "layer 1 (Hoarder)" in reason
    assert "'packed[0]'" in reason


@pytest.mark.parametrize("method", ["medusa", "dflash"])
def test_other_drafters_with_weights_are_rejected_by_their_method(method: str) -> None:
    config = {"speculative_config": SimpleNamespace(method=method)}
    reason = support.config_obstacle(SimpleNamespace(**CONFIG | config))
    assert reason is not None
    assert f"method {method!r}" in reason


@pytest.mark.parametrize(
    ("device", "kind"),
    [("cpu", "Qwen3NextMTP"), *((d, "OpenPanguMTPModel") for d in ("cpu", "cuda"))],
)
def test_mtp_layers_of_other_architectures_are_rejected_by_name(
    device: str, kind: str
) -> None:
    config = {
        "speculative_config": SimpleNamespace(
            method="mtp", draft_model_config=SimpleNamespace(architectures=[kind])
        ),
        "device_config": SimpleNamespace(device_type=device),
    }
    reason = support.config_obstacle(SimpleNamespace(**CONFIG | config))
    assert reason == (
        "a drafter with weights is configured, and its MTP layers are of a kind that "
        f"has not been exchanged on {device} yet ({kind})"
    )


def test_a_quantised_drafter_is_rejected() -> None:
    config = SimpleNamespace(
        method="eagle", draft_model_config=SimpleNamespace(quantization="fp8")
    )
    drafting = {"speculative_config": config}
    reason = support.config_obstacle(SimpleNamespace(**CONFIG | drafting))
    assert reason == (
        "a drafter with weights is configured, and the drafter is quantised (fp8)"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mtp_layers_beside_a_quantised_model_are_rejected(device: str) -> None:
    model = SimpleNamespace(enable_sleep_mode=False, quantization="fp8", model="m")
    drafter = SimpleNamespace(
        quantization=None, architectures=["MiMoMTPModel"], model="m"
    )
    config = {
        "model_config": model,
        "speculative_config": SimpleNamespace(method="mtp", draft_model_config=drafter),
        "device_config": SimpleNamespace(device_type=device),
    }
    reason = support.config_obstacle(SimpleNamespace(**CONFIG | config))
    assert reason == (
        "a drafter with weights is configured, and the model is quantised (fp8)"
    )
