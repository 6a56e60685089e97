"""An adapter is replaced completely, between two steps, or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.e2e.test_adapters import ADAPTERS, TEXT, adapted, pinned
from tests.e2e.test_pause_features import GREEDY as LONG
from tests.e2e.test_pause_features import lived
from tests.support.engines.adapters import make_adapter
from vllm.inflight.errors import EngineFault, Forbidden, Malformed
from vllm.inflight.outputs.spans import as_dicts

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Any], old: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    fence = {"allowed_paths": str(tmp_path_factory.getbasetemp())}
    return start(old, additional_config={"inflight": fence}, **ADAPTERS)


@pytest.fixture
def adapter(llm: Any, old: Path, tmp_path: Path) -> LoRARequest:
    llm.llm_engine.remove_lora(1)
    return make_adapter(old, tmp_path)


def again(llm: Any, adapter: LoRARequest) -> None:
    """Load it again, under its name and number."""
    request = LoRARequest(
        adapter.lora_name, adapter.lora_int_id, adapter.lora_path, load_inplace=True
    )
    assert llm.llm_engine.add_lora(request)


def without_its_file(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def with_a_rank_that_is_too_large(folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 512}))


def of_a_module_that_is_unknown(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    renamed = {name.replace("q_proj", "zz_proj"): t for name, t in tensors.items()}
    save_file(renamed, file)


def of_a_larger_model(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(
        {n: t.repeat(1, 2) if "lora_A" in n else t for n, t in tensors.items()}, file
    )


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (without_its_file, Malformed),
        (with_a_rank_that_is_too_large, Malformed),
        (of_a_module_that_is_unknown, Malformed),
        (of_a_larger_model, EngineFault),
    ],
)
def test_a_failed_load_leaves_the_adapter_unchanged(
    llm: Any,
    adapter: LoRARequest,
    spoil: Callable[[Path], None],
    refusal: type[Exception],
) -> None:
    before = adapted(llm, adapter)
    spoil(Path(adapter.lora_path))
    for _ in range(2):
        with pytest.raises(refusal, match="adapter 'adapter'"):
            again(llm, adapter)
        assert adapted(llm, adapter) == before
    assert llm.llm_engine.list_loras() == {1}


def test_an_adapter_outside_of_the_allowed_folders_is_not_looked_at(
    llm: Any, adapter: LoRARequest, old: Path, tmp_path: Path
) -> None:
    before = adapted(llm, adapter)
    with TemporaryDirectory() as elsewhere:
        make_adapter(old, Path(elsewhere), seed=1)
        (tmp_path / "link").symlink_to(elsewhere)
        for path in (elsewhere, str(tmp_path / "link")):
            with pytest.raises(Forbidden, match="--inflight-allowed-paths"):
                again(llm, LoRARequest("adapter", 1, path))
    assert adapted(llm, adapter) == before


@pytest.mark.parametrize("path", ["~/adapter", "someone/adapter", "adapter", "./here"])
def test_a_path_that_vllm_would_look_for_is_rejected_where_folders_are_allowed(
    llm: Any,
    adapter: LoRARequest,
    old: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    """Below the working directory, which is allowed, there is such a folder as well."""
    before = adapted(llm, adapter)
    monkeypatch.chdir(tmp_path)
    with TemporaryDirectory() as home:
        monkeypatch.setenv("HOME", home)
        for folder in (tmp_path / path, Path(home) / "adapter"):
            folder.mkdir(parents=True)
            make_adapter(old, folder, seed=1)
        with pytest.raises(Forbidden, match="not an absolute path"):
            again(llm, LoRARequest("adapter", 1, path))
        params = SamplingParams(temperature=0, max_tokens=2)
        (output,) = llm.generate(
            [TEXT], params, use_tqdm=False, lora_request=LoRARequest("new", 2, path)
        )
        assert output.outputs[0].finish_reason == "error"
        assert "not an absolute path" in output.outputs[0].stop_reason
    assert adapted(llm, adapter) == before
    assert llm.llm_engine.list_loras() == {1}


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapters_file_may_not_lead_out_of_the_allowed_folders(
    llm: Any, adapter: LoRARequest, old: Path, tmp_path: Path, name: str
) -> None:
    before = adapted(llm, adapter)
    folder = tmp_path / "linked"
    folder.mkdir()
    with TemporaryDirectory() as elsewhere:
        make_adapter(old, folder, seed=1)
        make_adapter(old, Path(elsewhere), seed=1)
        (folder / name).unlink()
        (folder / name).symlink_to(Path(elsewhere) / name)
        with pytest.raises(Forbidden, match=f"{name}.*--inflight-allowed-paths"):
            again(llm, LoRARequest("adapter", 1, str(folder)))
    assert adapted(llm, adapter) == before


def test_an_adapters_files_may_be_links_within_the_allowed_folders(
    llm: Any, adapter: LoRARequest, old: Path, tmp_path: Path
) -> None:
    """As in a hub's cache."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    make_adapter(old, blobs, seed=1)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    (tmp_path / "here").symlink_to(snapshot)
    again(llm, LoRARequest("adapter", 1, str(blobs)))
    plain = adapted(llm, adapter)
    again(llm, LoRARequest("adapter", 1, str(tmp_path / "here")))
    assert adapted(llm, adapter) == plain


def test_an_adapter_is_replaced_and_replaced_again(
    llm: Any, old: Path, adapter: LoRARequest
) -> None:
    folder = Path(adapter.lora_path)
    first = adapted(llm, adapter)
    make_adapter(old, folder, seed=1)
    again(llm, adapter)
    second = adapted(llm, adapter)
    assert second != first
    of_a_larger_model(folder)
    with pytest.raises(EngineFault):
        again(llm, adapter)
    assert adapted(llm, adapter) == second
    make_adapter(old, folder)
    again(llm, adapter)
    assert adapted(llm, adapter) == first


def test_a_pinned_adapter_stays_pinned(
    llm: Any, old: Path, adapter: LoRARequest
) -> None:
    adapted(llm, adapter)
    assert llm.llm_engine.pin_lora(adapter.lora_int_id)
    folder = Path(adapter.lora_path)
    make_adapter(old, folder, seed=1)
    again(llm, adapter)
    assert pinned(llm) == {adapter.lora_int_id}
    of_a_larger_model(folder)
    with pytest.raises(EngineFault):
        again(llm, adapter)
    assert pinned(llm) == {adapter.lora_int_id}


def test_a_new_adapter_that_does_not_fit_is_loaded_on_no_rank(
    llm: Any, adapter: LoRARequest
) -> None:
    of_a_larger_model(Path(adapter.lora_path))
    with pytest.raises(EngineFault, match="no rank has it"):
        llm.llm_engine.add_lora(adapter)
    assert llm.llm_engine.list_loras() == set()


def test_requests_go_on_with_the_new_weights(
    llm: Any, old: Path, adapter: LoRARequest
) -> None:
    params = SamplingParams(**LONG)
    alone = [list(c.token_ids) for c in lived(llm, params, lora_request=adapter)]

    def replace() -> None:
        make_adapter(old, Path(adapter.lora_path), seed=1)
        again(llm, adapter)

    for choice, before in zip(
        lived(llm, params, replace, lora_request=adapter), alone, strict=True
    ):
        assert len(choice.token_ids) == len(before)
        assert list(choice.token_ids) != before
        first, second = choice.weight_versions
        assert second.adapter_load == first.adapter_load + 1
        assert (first.adapter, second.adapter) == ("adapter", "adapter")
        assert (first.start, first.end, second.end) == (0, second.start, len(before))
        assert list(choice.token_ids)[: first.end] == before[: first.end]


def test_replacing_an_adapter_does_not_affect_requests_without_it(
    llm: Any, adapter: LoRARequest
) -> None:
    def replace() -> None:
        again(llm, adapter)

    for choice in lived(llm, SamplingParams(**LONG), replace):
        (span,) = choice.weight_versions
        assert as_dicts([span]) == [
            {"version": "old", "epoch": span.epoch, "start": 0, "end": 60}
        ]


def test_spans_name_the_adapter_and_its_load_in_replies(
    llm: Any, adapter: LoRARequest
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([TEXT], params, use_tqdm=False, lora_request=adapter)
    (span,) = as_dicts(output.outputs[0].weight_versions)
    assert (span["adapter"], span["start"], span["end"]) == ("adapter", 0, 4)
    again(llm, adapter)
    (output,) = llm.generate([TEXT], params, use_tqdm=False, lora_request=adapter)
    (later,) = as_dicts(output.outputs[0].weight_versions)
    assert later == span | {"adapter_load": span["adapter_load"] + 1}


def test_removing_an_adapter_under_its_request_begins_a_new_load_in_the_spans(
    llm: Any, adapter: LoRARequest
) -> None:
    def let_go() -> None:
        assert llm.llm_engine.remove_lora(1)

    params = SamplingParams(**LONG)
    for choice in lived(llm, params, let_go, lora_request=adapter):
        first, second = choice.weight_versions
        assert second.adapter_load == first.adapter_load + 1
