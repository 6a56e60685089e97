"""Deltas of quantised checkpoints on a GPU, under CUDA graphs, in either staging.

The tests of tests/e2e/test_quantised_deltas.py, with the kernels of a GPU.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_quantised_deltas import (  # noqa: F401 (tests, run here on a GPU)
    fresh,
    sent,
    test_a_chain_of_deltas_equals_whole_versions,
    test_a_delta_between_two_checkpoints_on_disk_leads_from_one_to_the_other,
    test_a_delta_from_another_version_is_rejected_at_once,
    test_a_delta_is_committed_while_requests_run,
    test_a_delta_of_a_norm_alone_leaves_the_quantised_layers_as_they_are_served,
    test_a_flipped_bit_changes_nothing,
    test_a_lost_part_changes_nothing,
    test_a_version_without_a_change_is_a_version,
    test_after_another_trainers_version_the_whole_one_is_sent,
    test_after_each_of_many_deltas_and_rollbacks_it_serves_what_a_fresh_engine_does,
    weights,
)
from tests.support.gpu.admission import Admitted
from tests.support.models.quantised import FILE
from vllm.inflight.trainer import Publisher
from vllm.inflight.worker.model.kinds import quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 1024, "layers": 2}
GRAPHS = {"enforce_eager": False}
STAGINGS = {
    "device": {"staging": "device"},
    "delta": {"staging": "delta", "delta_gib": 1},
}
KEPT = ("fp8-channel", "fp8-block", "int8")
"""Checkpoints whose bytes the kernels of a GPU read as they are."""


class Case(NamedTuple):
    kind: str
    staging: str


@pytest.fixture(
    scope="module",
    params=[Case(kind, staging) for kind in KEPT for staging in STAGINGS],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quantized.PROVED, "cuda", Admitted())
        yield request.param


@pytest.fixture(scope="module")
def old(checkpoint: Callable[..., Path], case: Case) -> Path:
    return checkpoint(0, case.kind, **SHAPE)


@pytest.fixture(scope="module")
def new(checkpoint: Callable[..., Path], case: Case) -> Path:
    return checkpoint(1, case.kind, **SHAPE)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return GRAPHS


@pytest.fixture(scope="module")
def llm(
    start: Callable[..., Any],
    old: Path,
    case: Case,
    fresh: list[Any],  # noqa: F811 (the fixture)
) -> Any:
    return start(
        old,
        weight_transfer_config=WeightTransferConfig(backend="local"),
        additional_config={"inflight": STAGINGS[case.staging]},
        **GRAPHS,
    )


def test_every_tensor_of_a_quantised_layer_has_its_place(llm: Any, old: Path) -> None:
    llm.update_weights_from_disk(str(old), "old")
    shadow = (
        llm.llm_engine.model_executor.driver_worker.worker.vllm_inflight.stager.shadow
    )
    names = {name for name in load_file(old / FILE) if "_proj." in name}
    assert shadow.unkept == {}
    assert {name for name in names if shadow.kept.known(name) is not None} == names


def test_a_scrub_after_a_delta_names_the_tensor_with_a_changed_byte(
    llm: Any,
    weights: dict[str, torch.Tensor],  # noqa: F811 (the fixture)
) -> None:
    (model,) = llm.collective_rpc(lambda worker: worker.get_model())
    name = "model.layers.1.mlp.down_proj.weight"
    data = dict(model.named_parameters())[name].data
    with Publisher(llm, weights) as to:
        to.publish()
        assert llm.verify_weights()["result"] == "equal"
        weights[name].view(torch.uint8)[0, 0] ^= 1
        assert to.publish().is_delta
        for _ in range(2):  # the delta, and the version before it
            assert llm.verify_weights()["result"] == "equal"
            element = data.as_strided((1,), (1,), data.storage_offset() + 5)
            bits = element.view(torch.uint8)
            bits ^= 1
            torch.cuda.synchronize()
            try:
                assert llm.verify_weights()["different"] == [name]
            finally:
                bits ^= 1
                torch.cuda.synchronize()
            to.rollback()
