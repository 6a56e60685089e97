"""Quantised layers with delta staging: processed apart, and swapped where they differ.

An update processes each layer in memory of its own, as loading does. What differs from
the live layer enters the log. The kernels here multiply with the parameters themselves.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

import tests.support.engines.transport  # noqa: F401 (registers the transport "other")
from tests.e2e.test_delta_staging import (
    ROOM,
    delta_engine,
    fail_as_it_writes,
    live_of,
    settle,
    shadow_of,
    stage,
    without_packing,  # noqa: F401 (a fixture)
)
from tests.e2e.test_quantised import COMPILED, ONLINE, SCALE, WEIGHT, WIDE
from tests.support.engines.drafted import either_or_both
from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.mixtures import mixed, part, said
from tests.support.engines.probe import commits_and_rollbacks, greedy, outcome
from tests.support.models.quantised import FILE
from tests.support.models.tiny_drafters import METHODS
from vllm.inflight.errors import (
    ChangeLogFull,
    ConfigError,
    EngineFault,
    WeightsMismatch,
)
from vllm.inflight.trainer import Publisher, publisher
from vllm.inflight.worker.staging.worker import StagingWorker

pytestmark = pytest.mark.engine

FP8 = "fp8-channel"
KINDS = [
    (FP8, {}),
    pytest.param(FP8, COMPILED, marks=pytest.mark.slow),
    (None, ONLINE),
    pytest.param(None, ONLINE | COMPILED, marks=pytest.mark.slow),
    pytest.param("int4", {}, marks=WIDE),
    pytest.param("int4", COMPILED, marks=(WIDE, pytest.mark.slow)),
]


@pytest.fixture(scope="module")
def fp8(checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return checkpoint(0, FP8), checkpoint(1, FP8)


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], fp8: tuple[Path, Path]) -> list[Any]:
    """Tokens and digests of engines that are started on either version."""
    return [said(start(folder)) for folder in fp8]


@pytest.fixture(scope="module")
def llm(
    start: Callable[..., Any],
    fp8: tuple[Path, Path],
    fresh: list[Any],
) -> Any:
    return delta_engine(start, fp8[0])


@pytest.fixture
def on_old(llm: Any, fp8: tuple[Path, Path]) -> Iterator[Any]:
    """The engine on the old weights; none of its parameters moves."""
    addresses = {name: param.data_ptr() for name, param in live_of(llm).items()}
    llm.update_weights_from_disk(str(fp8[0]), "old")
    yield llm
    assert {n: param.data_ptr() for n, param in live_of(llm).items()} == addresses


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_quantised_weights_equal_a_fresh_engine_after_every_commit_and_rollback(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    kind: str | None,
    options: dict[str, Any],
) -> None:
    old, new = checkpoint(0, kind), checkpoint(1, kind)
    fresh = greedy(start(new, **options))
    llm = delta_engine(start, old, **options)
    commits_and_rollbacks(llm, old, new, fresh)
    assert llm.verify_weights()["result"] == "equal"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FP8, {}),
        pytest.param(None, ONLINE, marks=pytest.mark.slow),
        pytest.param("int4", {}, marks=(WIDE, pytest.mark.slow)),
    ],
)
def test_biases_beside_quantised_weights_are_updated_with_them(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    kind: str | None,
    options: dict[str, Any],
) -> None:
    old, new = (checkpoint(seed, kind, family="qwen2") for seed in (0, 1))
    fresh = said(start(new, **options))
    llm = delta_engine(start, old, **options)
    first = said(llm)
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert said(llm) == fresh
        llm.rollback_weights()
        assert said(llm) == first
    assert len({name for name in fresh[1] if name.endswith("bias")}) > 1


def test_every_parameter_is_what_a_fresh_engine_makes_of_the_checkpoint(
    on_old: Any, fp8: tuple[Path, Path], fresh: list[Any]
) -> None:
    assert said(on_old) == fresh[0]
    for _ in range(2):
        on_old.update_weights_from_disk(str(fp8[1]), "new")
        assert said(on_old) == fresh[1]
        on_old.rollback_weights()
        assert said(on_old) == fresh[0]
        on_old.rollback_weights()
        assert said(on_old) == fresh[1]
        on_old.update_weights_from_disk(str(fp8[0]), "old")
        assert said(on_old) == fresh[0]
    assert on_old.verify_weights()["result"] == "equal"


def test_one_set_of_weights_has_memory_and_what_differs_enters_the_log(
    on_old: Any, fp8: tuple[Path, Path], tmp_path: Path
) -> None:
    shadow = shadow_of(on_old)
    own = [p for p in shadow.module.parameters() if not p.is_meta]
    assert not own, "there are no biases"
    tensors = load_file(fp8[0] / FILE)
    bits = tensors[WEIGHT].view(torch.uint8)
    bits[3, 5:9] ^= 1
    tensors[SCALE][7] *= 2
    tensors["model.norm.weight"][2] += 1
    save_file(tensors, tmp_path / FILE)
    before = said(on_old)
    on_old.update_weights_from_disk(str(tmp_path), "six elements")
    assert shadow.log.num_elements == 4 + 1 + 1
    after = said(on_old)
    changed = {name for name, digest in after[1].items() if digest != before[1][name]}
    assert len(changed) == 3
    on_old.update_weights_from_disk(str(tmp_path), "the same again")
    assert shadow.log.num_elements == 0 and said(on_old) == after


def test_an_update_that_is_aborted_or_rejected_changes_nothing_and_keeps_the_way_back(
    on_old: Any, fp8: tuple[Path, Path], fresh: list[Any], tmp_path: Path
) -> None:
    old, new = fp8
    on_old.update_weights_from_disk(str(new), "new")
    half = load_file(old / FILE)
    for name in list(half)[::2]:
        del half[name]
    save_file(half, tmp_path / FILE)
    for folder, is_staged in ((tmp_path, False), (old, False), (old, True)):
        update_id = stage(on_old, folder)
        if is_staged:
            on_old.prepare_weight_update(update_id=update_id)
        told = on_old.abort_weight_update(update_id=update_id)
        assert "rollback_target" not in told and said(on_old) == fresh[1]
        for expected in fresh:
            on_old.rollback_weights()
            assert said(on_old) == expected
    with pytest.raises(WeightsMismatch, match="missing"):
        on_old.update_weights_from_disk(str(tmp_path), "half")
    tensors = load_file(old / FILE)
    short = {name: tensor for name, tensor in tensors.items() if name != SCALE}
    save_file(short, tmp_path / FILE)
    with pytest.raises(WeightsMismatch, match="missing") as refusal:
        on_old.update_weights_from_disk(str(tmp_path), "short")
    assert refusal.value.tensors == [SCALE]
    wide = tensors | {WEIGHT: tensors[WEIGHT].to(torch.int32)}
    save_file(wide, tmp_path / FILE)
    with pytest.raises(WeightsMismatch, match="is int32, the model's is float8"):
        on_old.update_weights_from_disk(str(tmp_path), "wide")
    wrong = tensors | {SCALE: torch.full_like(tensors[SCALE], torch.nan)}
    save_file(wrong, tmp_path / FILE)
    with pytest.raises(WeightsMismatch, match="NaN"):
        on_old.update_weights_from_disk(str(tmp_path), "NaN")
    for expected in fresh:
        on_old.rollback_weights()
        assert said(on_old) == expected


def test_a_subset_of_whole_layers_leaves_the_rest_as_it_is_served(
    on_old: Any, fp8: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = fp8
    patterns = ("*.down_proj.*",)
    on_old.update_weights_from_disk(str(mixed(old, new, patterns, tmp_path)), "mixed")
    expected = said(on_old)
    on_old.rollback_weights()
    before = said(on_old)
    some = part(new, patterns, tmp_path / "part")
    on_old.update_weights_from_disk(some, "part", subset=patterns)
    assert said(on_old) == expected != before
    assert on_old.verify_weights()["result"] == "equal"
    on_old.rollback_weights()
    assert said(on_old) == before
    some = part(new, (WEIGHT,), tmp_path / "less")
    with pytest.raises(WeightsMismatch, match="missing") as refusal:
        on_old.update_weights_from_disk(some, "less", subset=(WEIGHT,))
    assert refusal.value.tensors == [SCALE]
    assert said(on_old) == before


def test_weights_that_are_lost_are_filled_in_place(
    on_old: Any, fp8: tuple[Path, Path], fresh: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="it broke off"):
        on_old.collective_rpc(fail_as_it_writes)
    assert on_old.weight_info()["weights"] == "gone"
    tensors = load_file(fp8[1] / FILE)
    del tensors[SCALE]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(WeightsMismatch, match="missing"):
        on_old.update_weights_from_disk(str(tmp_path), "short")
    assert on_old.weight_info()["weights"] == "gone"
    on_old.update_weights_from_disk(str(fp8[1]), "new")
    assert said(on_old) == fresh[1]
    assert on_old.verify_weights()["result"] == "equal"


def test_a_quantised_weight_that_reads_back_as_another_one_ends_the_fill(
    on_old: Any, fp8: tuple[Path, Path], fresh: list[Any], monkeypatch: Any
) -> None:
    with pytest.raises(RuntimeError, match="it broke off"):
        on_old.collective_rpc(fail_as_it_writes)
    staged, param = StagingWorker.staged, live_of(on_old)[WEIGHT]

    def write_first(self: StagingWorker, *args: Any, **options: Any) -> Any:
        param.data.view(torch.uint8)[2, 3] ^= 1
        settle()
        return staged(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(StagingWorker, "staged", write_first)
        with pytest.raises(EngineFault, match=f"{WEIGHT} was filled in and reads back"):
            on_old.update_weights_from_disk(str(fp8[1]), "new")
    on_old.update_weights_from_disk(str(fp8[1]), "new")
    assert said(on_old) == fresh[1]


def test_a_scrub_finds_a_quantised_weight_that_changed_since_the_commit(
    on_old: Any, fp8: tuple[Path, Path]
) -> None:
    on_old.update_weights_from_disk(str(fp8[1]), "new")
    param = live_of(on_old)[WEIGHT]
    param.data.view(torch.uint8)[2, 3] ^= 1
    settle()
    found = on_old.verify_weights()
    assert found["result"] == "different" and WEIGHT in str(found)
    param.data.view(torch.uint8)[2, 3] ^= 1
    settle()
    assert on_old.verify_weights()["result"] == "equal"


def test_an_update_that_the_log_has_no_room_for_is_rejected_with_the_numbers(
    start: Callable[..., Any], fp8: tuple[Path, Path], fresh: list[Any]
) -> None:
    small = {"staging": "delta", "delta_host_gib": 0}
    llm = delta_engine(start, fp8[0], inflight=small)
    with pytest.raises(ChangeLogFull, match=r"--inflight-delta-gib 0\.00") as full:
        llm.update_weights_from_disk(str(fp8[1]), "new")
    assert full.value.missing_bytes > 0
    assert said(llm) == fresh[0]
    llm.update_weights_from_disk(str(fp8[0]), "the same")
    assert said(llm) == fresh[0]
    assert llm.verify_weights()["result"] == "equal"


def test_a_transport_of_somebody_else_updates_them(
    start: Callable[..., Any], fp8: tuple[Path, Path], fresh: list[Any]
) -> None:
    transfer = WeightTransferConfig(backend="other")
    llm = delta_engine(start, fp8[0], weight_transfer_config=transfer)
    assert outcome(llm, str(fp8[1])) == "committed"
    assert said(llm) == fresh[1]
    llm.rollback_weights()
    assert said(llm) == fresh[0]


@pytest.mark.parametrize(
    ("kind", "options"), [(None, ONLINE), pytest.param("int4", {}, marks=WIDE)]
)
def test_a_delta_of_a_layer_that_is_served_in_another_form_is_followed_by_the_whole(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    options: dict[str, Any],
) -> None:
    folder = checkpoint(0, kind)
    llm = delta_engine(start, folder, **options)
    # The first engine of a process has vLLM's loggers pass nothing on.
    monkeypatch.setattr(publisher.logger, "handlers", [caplog.handler])
    weights = load_file(folder / FILE)
    name = WEIGHT if kind is None else f"{WEIGHT}_packed"
    bits = weights[name].view(torch.uint8)
    with Publisher(llm, weights, delta="always") as to:
        to.publish("old")
        weights["model.norm.weight"][0] += 1
        assert to.publish("a norm").is_delta
        bits[0, 0] ^= 0x40
        assert not to.publish("a quantised weight").is_delta
        assert "of its quantised layer: its kernel reads weight" in caplog.text
        served = said(llm)
        to.rollback()
        to.rollback()
        assert said(llm) == served
    assert llm.verify_weights()["result"] == "equal"


def test_a_trainer_engine_sends_the_whole_version_where_a_layer_takes_no_delta(
    start: Callable[..., Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, backend = checkpoint(0), "inflight_gloo"
    transfer = WeightTransferConfig(backend=backend)
    llm = delta_engine(start, folder, weight_transfer_config=transfer, **ONLINE)
    weights = load_file(folder / FILE)
    seen = []
    with FarTrainer(llm, backend, folder, delta="always") as far:
        far.send(folder)
        for name in ("model.norm.weight", WEIGHT):
            weights[name].view(-1)[0] += 1
            save_file(weights, tmp_path / FILE)
            sent = far.send(tmp_path)
            assert sent is not None
            seen.append((sent.is_delta, llm.weight_info()["digest"], said(llm)))
    assert [is_delta for is_delta, *_ in seen] == [True, False]
    llm.rollback_weights()
    assert (llm.weight_info()["digest"], said(llm)) == seen[0][1:]
    llm.update_weights_from_disk(str(tmp_path))
    assert (llm.weight_info()["digest"], said(llm)) == seen[1][1:]
    assert llm.verify_weights()["result"] == "equal"


@pytest.mark.parametrize(
    "method",
    [m if m == "eagle3" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
)
def test_a_drafter_beside_them_changes_with_them_or_alone(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    method: str,
) -> None:
    old, new = (checkpoint(seed, family="llama") for seed in (0, 1))
    inflight = {"staging": "delta", "delta_gib": 0.05}
    options = {"additional_config": {"inflight": inflight}}
    either_or_both(start, (old, new), tmp_path, FP8, method, **options)


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX its copy is a parameter"
)
def test_a_kernel_that_multiplies_with_a_copy_of_its_weights_is_named_at_the_start(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    named = r"qkv_proj is quantised, .*CPUInt8ScaledMMLinearKernel\.dnnl_handler"
    with pytest.raises(ConfigError, match=named):
        delta_engine(start, checkpoint(0, "int8"), inflight=ROOM)
