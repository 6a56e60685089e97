"""What an engine can be started with: what keeps updates out keeps nothing else out.

With `staging auto` an engine starts that starts without this package, and tells why it
is not updated. With a place for the second set it is refused by name.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.layers.hpc.rope_norm import _hpc_rope_norm_instances
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.offloader import BaseOffloader
from vllm.v1.worker import gpu_model_runner

from tests.support.engines.probe import greedy
from vllm.inflight.errors import ConfigError, StagingUnavailable

pytestmark = pytest.mark.engine

HOST = {"additional_config": {"inflight": {"staging": "host"}}}


def is_refused(llm: Any, new: Path) -> str:
    """Why the engine refuses an update; it serves before and after."""
    before = greedy(llm)
    with pytest.raises(StagingUnavailable) as refusal:
        llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == before
    return refusal.value.message


class Once(BaseOffloader):
    """An offloader that takes the layers of one model, as vLLM's prefetching one."""

    num_models = 0

    def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
        self.num_models += 1
        assert self.num_models == 1, "wrap_modules should only be called once"
        return list(modules_generator)


@pytest.fixture
def offloader(monkeypatch: pytest.MonkeyPatch) -> Once:
    made = Once()
    monkeypatch.setattr(gpu_model_runner, "create_offloader", lambda config: made)
    return made


def test_an_engine_whose_weights_are_offloaded_serves_and_is_not_updated(
    start: Callable[..., Any], old: Path, new: Path, offloader: Once
) -> None:
    llm = start(old)
    assert "its weights are offloaded by Once" in is_refused(llm, new)
    assert offloader.num_models == 1


def test_offloading_is_rejected_by_name_if_shadow_weights_were_requested(
    start: Callable[..., Any], old: Path, offloader: Once
) -> None:
    with pytest.raises(ConfigError, match=r"is not possible: .* offloaded by Once"):
        start(old, **HOST)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's engine offloads then")
def test_offloading_that_has_no_effect_on_the_cpu_build_does_not_block_updates(
    start: Callable[..., Any], old: Path, new: Path, fresh: list[list[int]]
) -> None:
    """vLLM's CPU build takes the option, and its weights are on the host anyway."""
    llm = start(old, cpu_offload_gb=1)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh


class Peculiar(Qwen3ForCausalLM):
    """A model of somebody else, whose construction leaves traces."""

    NAME = "peculiar"
    num_built = 0
    most_built = 9

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        kind = type(self)
        kind.num_built += 1
        if kind.num_built > kind.most_built:
            raise AssertionError("a model is built once in a process")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _hpc_rope_norm_instances[self.NAME] = self  # as vLLM's own layer does


@pytest.fixture
def peculiar(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The options of an engine with such a model."""
    ModelRegistry.register_model("Peculiar", Peculiar)
    monkeypatch.setattr(Peculiar, "num_built", 0)
    yield {"hf_overrides": {"architectures": ["Peculiar"]}}
    _hpc_rope_norm_instances.clear()


def test_a_model_that_cannot_be_built_twice_is_served_and_not_updated(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    peculiar: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Peculiar, "most_built", 1)
    llm = start(old, **peculiar)
    reason = is_refused(llm, new)
    assert "the shadow model could not be built" in reason
    assert "a model is built once in a process" in reason
    (live,) = llm.collective_rpc(lambda worker: worker.model_runner.model)
    assert _hpc_rope_norm_instances[Peculiar.NAME] is live


def test_a_model_that_cannot_be_built_twice_is_rejected_if_updates_were_requested(
    start: Callable[..., Any],
    old: Path,
    peculiar: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Peculiar, "most_built", 1)
    with pytest.raises(ConfigError, match="a model is built once in a process"):
        start(old, **peculiar, **HOST)


def test_the_shadow_model_is_in_no_registry_of_upstream(
    start: Callable[..., Any], old: Path, new: Path, peculiar: dict[str, Any]
) -> None:
    """A step that looks a layer up there finds the live one, after a commit too."""
    llm = start(old, **peculiar)
    assert Peculiar.num_built == 2
    (live,) = llm.collective_rpc(lambda worker: worker.model_runner.model)
    assert _hpc_rope_norm_instances[Peculiar.NAME] is live
    before = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) != before
    assert _hpc_rope_norm_instances[Peculiar.NAME] is live


def test_parallelism_that_was_not_tried_serves_and_is_not_updated(
    start: Callable[..., Any], old: Path, new: Path
) -> None:
    reason = is_refused(start(old, enable_hc_sp=True), new)
    assert "enable_hc_sp=True" in reason


@pytest.mark.parametrize("backend", ["sparse_nccl", "nccl_m2n"])
def test_a_transport_that_may_write_live_weights_is_rejected_by_name(
    start: Callable[..., Any], old: Path, new: Path, backend: str
) -> None:
    llm = start(old, weight_transfer_config=WeightTransferConfig(backend=backend))
    assert f"weight transfer backend {backend!r}" in is_refused(llm, new)
    copy = torch.Tensor.copy_
    for connect in (
        lambda: llm.init_weight_transfer_engine({"init_info": {}}),
        lambda: llm.collective_rpc("start_weight_update"),
    ):
        with pytest.raises(StagingUnavailable, match=backend):
            connect()
    assert torch.Tensor.copy_ is copy
