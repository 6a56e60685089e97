"""Drafters with weights: replaced with their model, alone, or not at all."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_pause_features import GREEDY as LONG
from tests.e2e.test_pause_features import lived
from tests.support.engines.bare_core import call
from tests.support.engines.drafted import Drafted, drafted
from tests.support.models.tiny_drafters import METHODS, drafting, make_drafter
from vllm.inflight.errors import Conflict, EngineAsleep, WeightsMismatch
from vllm.inflight.update import DRAFT

pytestmark = pytest.mark.engine

SHAPE = {"family": "llama"}
Said = dict[tuple[str, str], Drafted]
"""What engines say that start on a model and a drafter, by their labels."""


@pytest.fixture(
    scope="module",
    params=[
        # EAGLE 3 is EAGLE with more of its model's states.
        pytest.param(each, marks=pytest.mark.slow if each == "eagle" else ())
        for each in METHODS
    ],
)
def method(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def drafters(
    method: str, old: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp(method)
    return {
        label: make_drafter(root / label, seed, old, method)
        for seed, label in enumerate(("old", "new"), start=5)
    }


@pytest.fixture(scope="module")
def said(
    start: Callable[..., Any],
    method: str,
    folders: dict[str, Path],
    drafters: dict[str, Path],
) -> Said:
    found: Said = {}
    for model, folder in folders.items():
        for label, draft in drafters.items():
            llm = start(folder, **options(method, draft))
            found[model, label] = drafted(llm)
    return found


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Any],
    method: str,
    said: Said,
    old: Path,
    drafters: dict[str, Path],
) -> Any:
    local = WeightTransferConfig(backend="local")
    beside = options(method, drafters["old"])
    return start(old, weight_transfer_config=local, **beside)


@pytest.fixture
def llm(engine: Any, old: Path, drafters: dict[str, Path]) -> Iterator[Any]:
    engine.update_weights_from_disk(str(old), "old", draft_path=str(drafters["old"]))
    yield engine
    if engine.weight_update_status()["active"] is not None:
        engine.abort_weight_update()


def options(method: str, draft: Path) -> dict[str, Any]:
    return {"dtype": "float32", "speculative_config": drafting(method, draft)}


def shares(llm: Any) -> int:
    """How many parameters a drafter has in common with its model."""
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    own = {id(param) for param in worker.get_model().parameters()}
    return sum(id(param) in own for param in worker.get_draft_model().parameters())


def test_model_and_drafter_are_updated_alone_or_together_and_rolled_back(
    llm: Any, said: Said, new: Path, drafters: dict[str, Path]
) -> None:
    """Drafts too are those of a fresh engine: no layer is of another version."""
    assert len({str(drafts) for _, drafts in said.values()}) == 4
    draft = str(drafters["new"])
    for path, draft_path, served in (
        (str(new), None, ("new", "old")),
        (None, draft, ("old", "new")),
        (str(new), draft, ("new", "new")),
    ):
        llm.update_weights_from_disk(path, "changed", draft_path=draft_path)
        assert drafted(llm) == said[served]
        llm.rollback_weights()
        assert drafted(llm) == said["old", "old"]


def test_a_model_or_drafter_that_an_update_leaves_out_keeps_its_weights(
    llm: Any, said: Said, old: Path, new: Path, drafters: dict[str, Path]
) -> None:
    llm.update_weights_from_disk(None, "a", draft_path=str(drafters["new"]))
    llm.update_weights_from_disk(str(new), "b")
    assert drafted(llm) == said["new", "new"]
    llm.update_weights_from_disk(None, "c", draft_path=str(drafters["old"]))
    assert drafted(llm) == said["new", "old"]
    llm.update_weights_from_disk(str(old), "d")
    assert drafted(llm) == said["old", "old"]


def test_upstreams_session_for_the_drafter_is_a_transaction(
    llm: Any, said: Said, drafters: dict[str, Path]
) -> None:
    llm.start_draft_weight_update()
    llm.update_weights({"update_info": {"path": str(drafters["new"])}})
    assert drafted(llm) == said["old", "old"]
    llm.finish_weight_update("drafter-2")
    assert drafted(llm) == said["old", "new"]
    assert llm.get_weight_version() == "drafter-2"


def test_a_read_includes_the_weights_of_the_drafter(
    llm: Any, new: Path, drafters: dict[str, Path]
) -> None:
    core = llm.llm_engine.engine_core.engine_core
    before = read(llm)
    llm.update_weights_from_disk(None, "drafter", draft_path=str(drafters["new"]))
    after = read(llm)
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert changed == {name for name in before if name.startswith(DRAFT)}
    assert read(llm, is_target=True) == {
        name: digest for name, digest in after.items() if name not in changed
    }
    tensors = load_file(drafters["new"] / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("mlp.down_proj.weight"))
    (inside,) = (name for name in changed if name.endswith("mlp.down_proj.weight"))
    rows = call(core, "rows", tensor=inside, num_rows=3)["rows"]
    assert rows == tensors[name][:3].float().tolist()


def read(llm: Any, **selected: Any) -> dict[str, str]:
    (rank,) = call(llm.llm_engine.engine_core.engine_core, "checksums", **selected)[
        "ranks"
    ]
    found: dict[str, str] = rank["checksums"]
    return found


def test_the_digest_covers_the_model_without_its_drafter(
    llm: Any, old: Path, new: Path, drafters: dict[str, Path]
) -> None:
    with_both = llm.update_weights_from_disk(
        str(new), "a", draft_path=str(drafters["new"])
    )
    core = llm.llm_engine.engine_core.engine_core
    assert call(core, "source")["path"] == str(new)
    alone = llm.update_weights_from_disk(None, "b", draft_path=str(drafters["old"]))
    assert alone["digest"] == with_both["digest"]
    assert alone["drift"]["overall"] == 0
    assert llm.update_weights_from_disk(str(new), "c")["digest"] == alone["digest"]


def test_requests_live_through_commits_of_both(
    llm: Any, new: Path, drafters: dict[str, Path]
) -> None:
    def update() -> None:
        llm.update_weights_from_disk(str(new), "new", draft_path=str(drafters["new"]))

    for choice in lived(llm, SamplingParams(**LONG), update):
        spans = [(s.version, s.start, s.end) for s in choice.weight_versions]
        (_, _, middle), _ = spans
        assert spans == [("old", 0, middle), ("new", middle, 60)]


def test_a_drafter_alone_is_rejected_while_the_models_weights_are_gone(
    llm: Any, old: Path, drafters: dict[str, Path]
) -> None:
    core = llm.llm_engine.engine_core.engine_core
    core.vllm_inflight.sleep.lose("a test has written over them")
    with pytest.raises(EngineAsleep, match="written over"):
        llm.update_weights_from_disk(None, "part", draft_path=str(drafters["new"]))
    assert llm.weight_info()["weights"] == "gone"
    llm.update_weights_from_disk(str(old), "old", draft_path=str(drafters["old"]))
    assert llm.weight_info()["weights"] == "live"


def test_an_incomplete_drafter_is_rejected_with_the_names_of_missing_tensors(
    llm: Any, said: Said, new: Path, drafters: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(drafters["new"] / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors")
    for path in (None, str(new)):
        with pytest.raises(WeightsMismatch, match=r"missing: draft\.model.*up_proj"):
            llm.update_weights_from_disk(path, "half", draft_path=str(tmp_path))
        assert drafted(llm) == said["old", "old"]


def test_tensors_unknown_to_a_drafter_are_rejected_by_name(
    llm: Any, said: Said, drafters: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(drafters["new"] / "model.safetensors")
    save_file(tensors | {"fc.bias2": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"draft\.fc\.bias2"):
        llm.update_weights_from_disk(None, "odd", draft_path=str(tmp_path))
    assert drafted(llm) == said["old", "old"]


def test_a_drafters_copy_of_a_shared_layer_is_passed_over(
    llm: Any, method: str, said: Said, drafters: dict[str, Path], tmp_path: Path
) -> None:
    shared = {
        "draft_model": [],  # all it has is its own
        "eagle": ["embed_tokens.weight", "lm_head.weight"],
        "eagle3": ["embed_tokens.weight"],
    }
    assert shares(llm) == len(shared[method])
    sent = load_file(drafters["new"] / "model.safetensors")
    config = json.loads((drafters["new"] / "config.json").read_text())
    shape = config["vocab_size"], config["hidden_size"]
    sent |= {name: torch.ones(shape) for name in shared[method]}
    save_file(sent, tmp_path / "model.safetensors")
    llm.update_weights_from_disk(None, "new", draft_path=str(tmp_path))
    assert drafted(llm) == said["old", "new"]


def test_a_drafter_is_not_sent_to_an_engine_without_one(
    start: Callable[..., Any], old: Path, drafters: dict[str, Path]
) -> None:
    llm = start(old, dtype="float32")
    with pytest.raises(Conflict, match="no draft model"):
        llm.update_weights_from_disk(None, "no", draft_path=str(drafters["new"]))
    with pytest.raises(WeightsMismatch, match=r"unknown: draft\."):
        llm.update_weights_from_disk(str(old), "no", draft_path=str(drafters["new"]))
