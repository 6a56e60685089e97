"""What is served is compared with the digest of its label, tensor by tensor."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.support.engines.mixtures import NORMS, part
from tests.support.engines.probe import greedy, prompts
from tests.support.waiting import until
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import ReadHealth, ReadMetrics
from vllm.inflight.engine.integrity import scrubs
from vllm.inflight.update import KV_CACHE, WEIGHTS
from vllm.inflight.worker.integrity.outside_writes import note_asleep, note_awake
from vllm.inflight.worker.integrity.scrub import ScrubSlice
from vllm.inflight.worker.worker_state import WorkerState

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return checkpoint(0), checkpoint(1)


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], folders: tuple[Path, Path]) -> Any:
    # In bf16 not every CPU packs its matrices.
    llm = start(folders[0], dtype="float32")
    first = llm.verify_weights()
    assert first["result"] == "unknown", "nobody has told the digest of the start"
    assert first["digest"] is None
    again = llm.verify_weights()
    assert again["result"] == "equal", "it is what it was a moment ago"
    assert (again["num_tensors"], again["num_unknown"]) == (0, 0)
    assert again["num_parameters"] > 0
    return llm


@pytest.fixture
def llm(engine: Any, folders: tuple[Path, Path]) -> Any:
    engine.update_weights_from_disk(str(folders[0]), "old")
    return engine


def num_tensors(folder: Path) -> int:
    return len(load_file(folder / "model.safetensors"))


def model_of(llm: Any) -> Any:
    """What the engine of this process serves; a call of its worker would be noticed."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def change(llm: Any, name: str) -> None:
    """Change one bit of a parameter that is served, as memory that fails would."""
    param = model_of(llm).get_parameter(name)
    param.data.view(torch.int16).view(-1)[5] ^= 1


def test_every_tensor_is_compared_with_what_was_announced(
    llm: Any, folders: tuple[Path, Path]
) -> None:
    told = llm.update_weights_from_disk(str(folders[1]), "new")
    found = llm.verify_weights()
    assert found["result"] == "equal"
    assert found["num_tensors"] == num_tensors(folders[1])
    assert (found["num_parameters"], found["num_unknown"]) == (0, 0)
    assert (found["weight_version"], found["digest"]) == ("new", told["digest"])
    assert llm.weight_info()["scrub"]["result"] == "equal"
    llm.rollback_weights()
    assert llm.weight_info()["scrub"] is None, "what it read is not served any more"
    assert llm.verify_weights()["result"] == "equal"


def test_a_subset_is_compared_with_all_of_the_version_that_it_made(
    llm: Any, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    some = part(folders[1], NORMS, tmp_path / "part")
    llm.update_weights_from_disk(some, "norms", subset=NORMS)
    found = llm.verify_weights()
    assert found["result"] == "equal"
    assert found["num_tensors"] == num_tensors(folders[0])


@pytest.mark.parametrize(
    ("param", "tensors"),
    [
        ("model.norm.weight", {"model.norm.weight"}),
        ("model.embed_tokens.weight", {"model.embed_tokens.weight"}),
        (
            "model.layers.1.self_attn.q_norm.weight",
            {"model.layers.1.self_attn.q_norm.weight"},
        ),
    ],
)
def test_a_scrub_names_the_tensors_with_a_changed_bit(
    llm: Any, param: str, tensors: set[str]
) -> None:
    change(llm, param)
    try:
        found = llm.verify_weights()
        assert found["result"] == "different"
        assert set(found["different"]) == tensors
        assert found["num_different"] == len(tensors)
    finally:
        change(llm, param)
    assert llm.verify_weights()["result"] == "equal"


def test_a_scrub_reads_packed_weights_in_the_form_that_is_multiplied(
    llm: Any, folders: tuple[Path, Path]
) -> None:
    """Of the CPU build; its parameter has been packed away."""

    def swap() -> None:
        layers = model_of(llm).model.layers
        one, other = (vars(layer.mlp.down_proj) for layer in layers[:2])
        one["cpu_linear"], other["cpu_linear"] = other["cpu_linear"], one["cpu_linear"]

    swap()
    try:
        found = llm.verify_weights()
        names = [f"model.layers.{n}.mlp.down_proj.weight" for n in range(2)]
        assert (found["result"], found["different"]) == ("different", names)
    finally:
        swap()


@pytest.mark.parametrize(
    ("value", "is_read"), [(0.0, True), (-0.0, False), (1e-40, False)]
)
def test_bits_that_a_packed_form_loses_are_no_difference(
    llm: Any,
    folders: tuple[Path, Path],
    tmp_path: Path,
    value: float,
    is_read: bool,
) -> None:
    """The CPU build reads a packed weight through its GEMM."""
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(folders[1] / "model.safetensors")
    weights[name].view(-1)[5] = value
    save_file(weights, tmp_path / "model.safetensors")
    llm.update_weights_from_disk(str(tmp_path), "with zeros")
    found = llm.verify_weights()
    assert (found["result"], found["different"]) == ("equal", [])
    assert found["num_tensors"] + found["num_unknown"] == num_tensors(tmp_path)
    assert set(found["unknown"]) <= (set() if is_read else {name})
    change(llm, "model.norm.weight")
    try:
        assert llm.verify_weights()["different"] == ["model.norm.weight"]
    finally:
        change(llm, "model.norm.weight")


@pytest.mark.parametrize("part", [WEIGHTS, KV_CACHE])
def test_a_sleep_ends_a_scrub_before_it_gives_memory_back(
    llm: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A level 1 sleep keeps what is served, and takes its memory all the same."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    stager = WorkerState.of(worker).require_stager()
    assert stager.scrub("begin") > 0
    with monkeypatch.context() as patch:
        patch.setattr(
            ScrubSlice, "read", lambda *_: pytest.fail("it read what is not there")
        )
        note_asleep(worker, (part,), (part,))
        assert stager.scrub("slice") is None
        assert stager.scrub("result") is None
    note_awake(worker, None)
    assert llm.verify_weights()["result"] == "equal"


def test_tokens_flow_during_a_scrub_and_a_commit_restarts_the_scrub(
    llm: Any, folders: tuple[Path, Path]
) -> None:
    outputs: list[Any] = []
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = greedy(llm)

    def decode() -> None:
        outputs.extend(llm.generate(prompts(8), sampling, use_tqdm=False))

    decoding = threading.Thread(target=decode)
    decoding.start()
    found = []
    while decoding.is_alive() or not found:
        found.append(llm.verify_weights())
        llm.update_weights_from_disk(str(folders[len(found) % 2]), f"v{len(found)}")
    decoding.join()
    assert {len(output.outputs[0].token_ids) for output in outputs} == {200}
    assert found and {each["result"] for each in found} == {"equal"}
    llm.update_weights_from_disk(str(folders[0]), "old")
    assert greedy(llm) == expected


def test_a_regular_scrub_reports_weights_that_have_changed(
    start: Callable[..., Any],
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"inflight": {"scrub_interval_s": 0.2}}
    llm = start(folders[0], additional_config=config)
    # vLLM's logging hands nothing on to pytest, and forgets handlers at each start.
    monkeypatch.setattr(scrubs.logger, "handlers", [caplog.handler])
    llm.update_weights_from_disk(str(folders[1]), "new")
    control = control_of(llm)

    def waits_for(result: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            scrub = llm.weight_info()["scrub"]
            (told,) = run_sync(control.ask(ReadMetrics()))
            if scrub and scrub["result"] == result:
                return told
            time.sleep(0.02)
        raise AssertionError(f"no scrub was {result}: {told}")

    told = waits_for("equal")
    assert told["scrubs"]["equal"] > 0 and not told["weights_differ"]
    change(llm, "model.norm.weight")
    assert waits_for("different")["weights_differ"]
    (health,) = run_sync(control.ask(ReadHealth()))
    assert "not what was committed" in health["weights_detail"]
    found = llm.weight_info()["scrub"]
    assert found["different"] == ["model.norm.weight"]
    line = "NOT what was committed under that label: model.norm.weight"
    until(lambda: line in caplog.text, "it was not logged")
    llm.update_weights_from_disk(str(folders[0]), "mended")
    assert not waits_for("equal")["weights_differ"]


def test_every_commit_is_read_back_where_that_was_asked_for(
    start: Callable[..., Any], folders: tuple[Path, Path]
) -> None:
    llm = start(folders[0], additional_config={"inflight": {"verify": "served"}})
    for label in ("a", "b"):
        llm.update_weights_from_disk(str(folders[1]), label)
        deadline = time.monotonic() + 60
        while (found := llm.weight_info()["scrub"]) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (found["result"], found["weight_version"]) == ("equal", label)


def test_a_scrub_covers_parameters_that_are_derived_from_the_checkpoint(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    """Mamba takes exponentials, and latent attention halves a weight."""
    for family, options, derived in (
        ("falcon_h1", {}, r"\.A$"),
        ("deepseek_v3", {"attention_backend": "CPU_MLA"}, r"W_U"),
    ):
        old, new = (checkpoint(seed, family=family) for seed in (0, 1))
        llm = start(old, **options)
        for folder in (new, old):
            llm.update_weights_from_disk(str(folder), folder.name)
            found = llm.verify_weights()
            assert found["result"] == "equal", found
            assert found["unknown"] == []
            assert 0 < found["num_parameters"] < found["num_tensors"]
        served = [name for name, _ in model_of(llm).named_parameters()]
        name = next(name for name in served if re.search(derived, name))
        scale(llm, name, 2)
        # Where a half is a view of the weight, the tensor is not what it was, either.
        assert name in llm.verify_weights()["different"]
        scale(llm, name, 0.5)


def scale(llm: Any, name: str, factor: float) -> None:
    model_of(llm).get_parameter(name).data.mul_(factor)
