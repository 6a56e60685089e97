"""State beside the parameters that would keep an old version is rejected, by name."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config.load import LoadConfig
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

from tests.e2e.test_models import CONFIG
from vllm.inflight.worker.model import layers, support
from vllm.inflight.worker.model.kinds import mla


def reason(layer: torch.nn.Module, **config: object) -> str | None:
    """Why a model with this layer is refused."""
    model = torch.nn.ModuleDict({"it": layer})
    return support.support_obstacle(model, SimpleNamespace(**CONFIG | config))


def layer_with(**attributes: object) -> torch.nn.Module:
    layer = torch.nn.Module()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def buffered(name: str, tensor: torch.Tensor, *, persistent: bool = True):
    layer = torch.nn.Module()
    layer.register_buffer(name, tensor, persistent=persistent)
    return layer


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("beta", torch.tensor(0.5)),
        ("running_mean", torch.zeros(4)),
        ("codes", torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_a_buffer_that_a_checkpoint_may_fill_is_rejected(name, tensor):
    assert reason(buffered(name, tensor)) == f"layer it loads the buffer {name!r}"
    assert reason(buffered(name, tensor, persistent=False)) is None


@pytest.mark.parametrize("name", ["_k_scale", "position_ids"])
def test_buffers_that_no_checkpoint_fills_are_allowed(name):
    assert reason(buffered(name, torch.arange(4.0))) is None


def test_a_buffer_that_its_layer_reads_at_every_step_becomes_a_parameter():
    layer = buffered("layer_scalar", torch.ones(1))
    assert reason(layer) is not None
    place = layer.layer_scalar.data_ptr()
    layers.adopt_buffers(layer)
    assert [name for name, _ in layer.named_parameters()] == ["layer_scalar"]
    assert layer.layer_scalar.data_ptr() == place
    assert reason(layer) is None


class Pixels(FusedMMInputNorm):
    """What a tower does to pixels first, without an engine's choice of how."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.register_buffer("weight", torch.ones(3))


def test_how_pixels_are_normalised_is_of_the_configuration_of_a_processor():
    assert reason(Pixels()) is None


def test_an_attribute_that_a_step_clears_again_keeps_no_version():
    features = [torch.zeros(8, 4)]
    assert reason(layer_with(deepstack_input_embeds=features)) is None
    assert "'other_embeds[0]'" in reason(layer_with(other_embeds=features))


def test_a_norm_without_a_weight_keeps_no_version():
    assert reason(layer_with(has_weight=False, weight=torch.ones(8))) is None
    assert "'weight'" in reason(layer_with(weight=torch.ones(8)))


def test_weights_that_only_the_attention_backend_keeps_are_named():
    sinks = torch.nn.Parameter(torch.zeros(4))
    impl = SimpleNamespace(sinks=sinks, alibi_slopes=torch.ones(4))
    assert reason(layer_with(sinks=sinks, impl=impl)) is None
    assert "'impl.sinks'" in reason(layer_with(impl=impl))  # no layer's parameter
    cast = layer_with(impl=SimpleNamespace(sinks=sinks.double()))
    assert "keeps weights in its attribute 'impl.sinks'" in reason(cast)


def test_weights_that_are_read_in_the_first_step_only_are_rejected():
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    casting = layer_with(sinks=half, impl=SimpleNamespace(sinks=half))
    assert reason(casting) == (
        "layer it casts its sinks in its first step (--dtype bfloat16 does not)"
    )
    assert "into the KV cache" in reason(layer_with(sink_populated=False))


def test_encoder_outputs_of_another_engine_are_rejected():
    shared = {"ec_transfer_config": SimpleNamespace()}
    assert "of other engines" in reason(torch.nn.Identity(), **shared)


def test_a_drafter_that_drafts_in_parallel_is_rejected():
    drafting = SimpleNamespace(
        method="eagle", parallel_drafting=True, draft_model_config=None
    )
    assert "in parallel" in reason(torch.nn.Identity(), speculative_config=drafting)


def test_a_drafter_with_a_quantised_copy_of_the_models_head_is_rejected():
    """An update would write the head, and no call makes its copy again."""
    drafting = SimpleNamespace(
        method="eagle", draft_lm_head_quantization="fp8", draft_model_config=None
    )
    found = reason(torch.nn.Identity(), speculative_config=drafting)
    assert "a quantised copy of the model's head (in fp8)" in str(found)


class GptOssForCausalLM(torch.nn.Module):
    """The name of a model whose loader writes past its parameters'."""


def test_a_loader_that_writes_into_its_input_is_rejected_on_several_ranks():
    for world_size, is_refused in (1, False), (2, True):
        parallel = SimpleNamespace(enable_eplb=False, world_size=world_size)
        config = SimpleNamespace(**CONFIG | {"parallel_config": parallel})
        found = support.support_obstacle(GptOssForCausalLM(), config)
        assert (found is not None and "several ranks (2)" in found) == is_refused


class Latent(MLAAttention):
    """Latent attention without its projections' sizes."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.kv_b_proj = torch.nn.Linear(2, 2)
        self.impl = None


def test_latent_attention_is_rejected_over_quantised_weights(monkeypatch):
    layer = Latent()
    assert reason(layer) is None
    monkeypatch.setattr(layer.kv_b_proj, "quant_method", object(), raising=False)
    assert "over quantised weights" in mla.derived_obstacle(layer)


def test_a_parameter_that_its_loader_made_is_rejected_by_name():
    """As vLLM's models by way of transformers make a bias of their head."""
    live, second = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    assert support.difference(live, second) is None
    second[0].bias = None
    reason = "layer 0 gains or loses the parameters ['bias'] after loading"
    assert support.difference(live, second) == reason


def on_gpu(**config: object) -> str | None:
    """What rules updates out in the configuration of an engine on a GPU."""
    given = {"device_config": SimpleNamespace(device_type="cuda")} | config
    return support.config_obstacle(SimpleNamespace(**CONFIG | given))


@pytest.mark.parametrize(
    ("offloading", "flag"),
    [
        (OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1)), "--cpu-offload-gb"),
        (
            OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=2)),
            "--offload-group-size",
        ),
    ],
)
def test_weights_that_are_offloaded_are_rejected_by_the_flag(offloading, flag):
    """Before a second set takes memory of a GPU that was too small for one."""
    reason = on_gpu(offload_config=offloading)
    assert reason == f"its weights are offloaded to the host ({flag})"
    assert on_gpu(offload_config=OffloadConfig()) is None
    assert reason is not None
    config = SimpleNamespace(**CONFIG | {"offload_config": offloading})
    assert support.config_obstacle(config) is None  # the CPU build offloads nothing


@pytest.mark.parametrize(
    ("given", "is_refused"), [({}, True), ({"mode": "copy"}, False), (None, True)]
)
def test_weights_that_other_engines_have_mapped_are_never_written_to(given, is_refused):
    loading = LoadConfig(load_format="ipc_cache")
    loading.model_loader_extra_config = given
    reason = on_gpu(load_config=loading)
    assert (reason is not None and "--load-format ipc_cache" in reason) is is_refused


def test_a_check_that_fails_blocks_updates_and_not_the_start(monkeypatch):
    """An engine that can be started without this package starts with it."""

    def fail(*_: object) -> None:
        raise AttributeError("no such layer")

    monkeypatch.setattr(support, "HiddenWeights", fail)
    found = reason(torch.nn.Identity())
    assert found is not None
    assert found.endswith("failed with AttributeError: no such layer")
    monkeypatch.setattr(support.parallelism, "parallelism_obstacle", fail)
    assert "no such layer" in str(on_gpu())
