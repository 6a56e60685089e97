"""Deltas of quantised checkpoints: equal to whole versions, and to fresh engines.

Where a kernel reads the checkpoint's own bytes and scales, a delta writes single
elements of them: into a log, or into shadow weights as on a GPU. The CPU build makes
whole tensors of a delta, and processes their layers again, whatever its kernels read.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_delta_staging import ROOM
from tests.e2e.test_deltas import (  # noqa: F401 (tests, run here with these engines)
    Sent,
    sent,
    step,
    test_a_chain_of_deltas_equals_whole_versions,
    test_a_delta_from_another_version_is_rejected_at_once,
    test_a_delta_is_committed_while_requests_run,
    test_a_flipped_bit_changes_nothing,
    test_a_lost_end_changes_nothing,
    test_a_lost_part_changes_nothing,
    test_a_version_without_a_change_is_a_version,
    test_after_another_trainers_version_the_whole_one_is_sent,
    weights,
)
from tests.e2e.test_quantised import WIDE
from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.mirrored import mirrored
from tests.support.engines.mixtures import said
from tests.support.engines.script import run_script
from tests.support.engines.unpacked import unpacked
from tests.support.models.quantised import FILE
from vllm.inflight.cli.main import main
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

FP8 = "fp8-channel"
SHAPE = {"family": "qwen2", "hidden": 256}
NUM_STEPS = 3


class Case(NamedTuple):
    """An engine: its checkpoint, its configuration, and what it is started in."""

    kind: str
    inflight: dict[str, Any] = {}
    context: Callable[[], Any] = nullcontext


CASES = {
    "log": Case(FP8, ROOM, unpacked),
    "shadow parameters": Case(FP8, {}, mirrored),
    "int8, packed": Case("int8"),
    "int4, packed": Case("int4"),
}


@pytest.fixture(
    scope="module",
    params=[
        "log",
        "shadow parameters",
        "int8, packed",
        pytest.param("int4, packed", marks=(WIDE, pytest.mark.slow)),
    ],
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = CASES[request.param]
    with found.context():
        yield found


@pytest.fixture(scope="module")
def old(checkpoint: Callable[..., Path], case: Case) -> Path:
    return checkpoint(0, case.kind, **SHAPE)


@pytest.fixture(scope="module")
def new(checkpoint: Callable[..., Path], case: Case) -> Path:
    return checkpoint(1, case.kind, **SHAPE)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """Options of all engines here."""
    return {}


@pytest.fixture(scope="module")
def fresh(
    start: Callable[..., Any],
    old: Path,
    options: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Any]:
    """Tokens and digests of engines that are started on the version of each step."""
    seen, stepped = [], load_file(old / FILE)
    for seed in range(NUM_STEPS):
        step(stepped, seed)
        folder = tmp_path_factory.mktemp("step") / "version"
        shutil.copytree(old, folder)
        save_file(stepped, folder / FILE, metadata={"format": "pt"})
        seen.append(said(start(folder, **options)))
    return seen


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], old: Path, case: Case, fresh: list[Any]) -> Any:
    return start(
        old,
        weight_transfer_config=WeightTransferConfig(backend="local"),
        additional_config={"inflight": case.inflight},
    )


def test_after_each_of_many_deltas_and_rollbacks_it_serves_what_a_fresh_engine_does(
    llm: Any,
    fresh: list[Any],
    weights: dict[str, torch.Tensor],  # noqa: F811 (the fixture)
) -> None:
    with Publisher(llm, weights) as to:
        assert not to.publish("whole").is_delta
        before = said(llm)
        for seed in range(NUM_STEPS):
            step(weights, seed)
            assert to.publish(f"step-{seed}").is_delta
            assert said(llm) == fresh[seed]
            to.rollback()
            assert said(llm) == before
            to.rollback()
            before = fresh[seed]
            assert said(llm) == before
            assert llm.verify_weights()["result"] == "equal"


def test_a_delta_of_a_norm_alone_leaves_the_quantised_layers_as_they_are_served(
    llm: Any,
    weights: dict[str, torch.Tensor],  # noqa: F811 (the fixture)
    tmp_path: Path,
) -> None:
    """The shadow weights hold another version of these layers then."""
    norm = weights["model.norm.weight"]
    with Publisher(llm, weights) as to:
        step(weights, 1)
        to.publish("whole")
        norm.view(torch.int16)[:] += 1
        assert to.publish("a norm").is_delta
        found = llm.weight_info()["digest"], said(llm)
        assert llm.verify_weights()["result"] == "equal"
    save_file(weights, tmp_path / FILE)
    llm.update_weights_from_disk(str(tmp_path), "all of it")
    assert found == (llm.weight_info()["digest"], said(llm))


def test_a_scrub_after_a_delta_names_the_tensor_with_a_changed_byte(
    llm: Any,
    case: Case,
    weights: dict[str, torch.Tensor],  # noqa: F811 (the fixture)
) -> None:
    (model,) = llm.collective_rpc(lambda worker: worker.get_model())
    # Packed layers are compared as a whole: see tests/e2e/test_scrub.py.
    own = "layers.1.mlp.down_proj" if case.kind == FP8 else "norm"
    name = f"model.{own}.weight"
    with Publisher(llm, weights) as to:
        to.publish()
        step(weights, 1)
        assert to.publish().is_delta
        for _ in range(3):  # the delta, the version before it, and again
            assert llm.verify_weights()["result"] == "equal"
            bits = model.get_parameter(name).data.view(torch.uint8)
            at = (2,) * bits.dim()
            bits[at] ^= 1
            assert llm.verify_weights()["different"] == [name]
            bits[at] ^= 1
            to.rollback()


def test_a_delta_between_two_checkpoints_on_disk_leads_from_one_to_the_other(
    llm: Any,
    old: Path,
    weights: dict[str, torch.Tensor],  # noqa: F811 (the fixture)
    tmp_path: Path,
) -> None:
    step(weights, 1)
    new = tmp_path / "new"
    shutil.copytree(old, new)
    save_file(weights, new / FILE, metadata={"format": "pt"})
    file, made = str(tmp_path / "step.delta"), str(tmp_path / "made")
    assert main(["delta", str(old), str(new), "-o", file]) == 0
    assert Path(file).stat().st_size < (new / FILE).stat().st_size / 4
    assert main(["apply", str(old), file, "-o", made]) == 0
    seen = []
    for folder in (made, str(new)):
        llm.update_weights_from_disk(folder)
        seen.append((llm.weight_info()["digest"], said(llm)))
    assert seen[0] == seen[1]


def test_a_trainer_engine_sends_what_has_changed_of_quantised_weights(
    start: Callable[..., Any],
    old: Path,
    case: Case,
    fresh: list[Any],
    weights: dict[str, torch.Tensor],  # noqa: F811 (the fixture)
    tmp_path: Path,
) -> None:
    backend = "inflight_gloo"
    llm = start(
        old,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        additional_config={"inflight": case.inflight},
    )
    whole = sum(tensor.nbytes for tensor in weights.values())
    with FarTrainer(llm, backend, old, delta="auto", bucket_bytes=1 << 16) as far:
        first = far.send(old)
        assert first is not None and not first.is_delta
        before = said(llm)
        for seed in range(NUM_STEPS):
            step(weights, seed)
            save_file(weights, tmp_path / FILE, metadata={"format": "pt"})
            if seed == NUM_STEPS - 1:
                llm.rollback_weights()  # it misses the step before
                assert said(llm) == before
            sent = far.send(tmp_path)
            assert sent is not None and sent.is_delta
            assert sent.num_bytes < whole / 4
            before = fresh[seed - 1] if seed else before
            assert said(llm) == fresh[seed]
    assert llm.verify_weights()["result"] == "equal"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallel", "staging"),
    [(FP8, "tensor", "delta"), (FP8, "pipeline", "delta"), ("int8", "tensor", "auto")],
)
def test_two_ranks_serve_what_deltas_of_quantised_weights_lead_to(
    checkpoint: Callable[..., Path], kind: str, parallel: str, staging: str
) -> None:
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    folder = checkpoint(0, kind, **SHAPE)
    seen = run_script("delta_ranks", folder, parallel, staging, env=bind)
    wholes = seen["wholes"]
    assert seen["deltas"] == [[True, *whole] for whole in wholes[:-1]]
    assert seen["rolled back"] == wholes[-3]
    assert seen["after that"] == [True, *wholes[-1]]
    assert seen["scrubbed"] == "equal"
