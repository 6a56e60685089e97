"""Classifiers: a score of the checkpoint, and one that vLLM makes of a causal model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.engines.mixtures import FILE, HEAD, MLP, mixed, part
from tests.support.engines.probe import prompts
from vllm.inflight.errors import StagingUnavailable, WeightsMismatch
from vllm.inflight.worker.model.kinds import classifier

pytestmark = pytest.mark.engine

EMBEDDING = "model.embed_tokens.weight"
POOLING = {"runner": "pooling", "max_model_len": 512}
ARCHITECTURE = {"architectures": ["Qwen3ForSequenceClassification"]}
METHODS: dict[str, dict[str, Any]] = {
    # Qwen3's reranker: one label, of two tokens.
    "from_2_way_softmax": {
        "classifier_from_token": ["a", "b"],
        "is_original_qwen3_reranker": True,
    },
    # BGE's: a label for each token.
    "no_post_processing": {
        "classifier_from_token": ["a", "b", "c"],
        "method": "no_post_processing",
    },
}
OTHER = WeightTransferConfig(backend="other")


def options(method: str) -> dict[str, Any]:
    return POOLING | {"hf_overrides": ARCHITECTURE | METHODS[method]}


def scores(llm: Any) -> list[list[float]]:
    """What becomes of six prompts."""
    outputs = llm.encode(prompts(6), pooling_task="classify", use_tqdm=False)
    return [output.outputs.data.tolist() for output in outputs]


def send(llm: Any, folder: Path, *chunks: dict[str, Any]) -> None:
    """An update whose tensors come in several calls."""
    llm.start_weight_update()
    for chunk in chunks:
        llm.update_weights({"update_info": {"path": str(folder), **chunk}})
    llm.finish_weight_update("new")


@pytest.mark.parametrize(
    ("method", "tied"),
    [
        # Every value of each in every run, every pair in the slow one.
        pytest.param(
            *(method, tied),
            id=f"{'tied' if tied else 'untied'}-{method}",
            marks=() if tied == bool(number % 2) else pytest.mark.slow,
        )
        for number, method in enumerate(METHODS)
        for tied in (False, True)
    ],
)
def test_a_classifier_made_of_a_causal_model_equals_a_fresh_engine(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    method: str,
    tied: bool,
) -> None:
    old, new = (checkpoint(seed, tied=tied) for seed in (0, 1))
    # The tensor of which the score is made, and nothing else.
    source = (EMBEDDING,) if tied else HEAD
    mixture = mixed(old, new, source, tmp_path / "mixed")
    fresh_mixture = scores(start(mixture, **options(method)))
    fresh = scores(start(new, **options(method)))
    llm = start(old, weight_transfer_config=OTHER, **options(method))
    before = scores(llm)
    assert len({str(said) for said in (before, fresh, fresh_mixture)}) == 3
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert scores(llm) == fresh
        llm.rollback_weights()
        assert scores(llm) == before
    llm.update_weights_from_disk(
        part(new, source, tmp_path / "part"), "some", subset=list(source)
    )
    assert scores(llm) == fresh_mixture
    # The rest on top of that is the whole, in whatever pieces.
    rest = sorted(set(load_file(new / FILE)) - set(source))
    llm.update_weights_from_disk(
        part(new, rest, tmp_path / "rest"), "rest", subset=rest
    )
    assert scores(llm) == fresh
    llm.update_weights_from_disk(str(old), "old")
    assert scores(llm) == before
    for chunks in (
        [{"names": list(source)}, {"names": rest}],
        [{"names": rest}, {"names": list(source)}],
        [{"one_by_one": True}],
    ):
        send(llm, new, *chunks)
        assert scores(llm) == fresh
        send(llm, old, {})
        assert scores(llm) == before


@pytest.fixture(scope="module")
def reranker(start: Callable[..., Any], checkpoint: Callable[..., Path]) -> Any:
    """An engine whose score is made of its head."""
    method = options("from_2_way_softmax")
    return start(checkpoint(0), weight_transfer_config=OTHER, **method)


def is_refused(llm: Any, folder: Path, *chunks: dict[str, Any]) -> WeightsMismatch:
    before = scores(llm)
    with pytest.raises(WeightsMismatch) as refusal:
        send(llm, folder, *chunks or [{}])
    assert scores(llm) == before
    return refusal.value


def test_a_version_without_the_tensor_that_makes_the_score_is_rejected_by_name(
    reranker: Any, checkpoint: Callable[..., Path]
) -> None:
    new = checkpoint(1)
    error = is_refused(reranker, new, {"skip": list(HEAD)})
    assert error.tensors == list(HEAD)
    assert "missing: lm_head.weight" in error.message
    send(reranker, new, {})  # the next one is taken


def test_a_head_without_the_rows_of_the_score_is_rejected_by_name(
    reranker: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(1), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / FILE)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:50].clone()
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    error = is_refused(reranker, tmp_path)
    assert error.tensors == list(HEAD)


def test_a_tensor_for_a_bias_that_the_score_lacks_is_rejected_and_changes_nothing(
    reranker: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """vLLM's loader would give the layer one, in the tree that it loads."""
    new = checkpoint(1)
    save_file({"score.bias": torch.zeros(1)}, tmp_path / FILE)
    error = is_refused(reranker, new, {"extra": {"score.bias": "model.norm.weight"}})
    assert "score.bias" in error.message
    send(reranker, new, {})


def test_a_subset_of_the_rest_keeps_the_score(
    reranker: Any,
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    old, new = checkpoint(0), checkpoint(1)
    send(reranker, old, {})
    some = part(new, MLP, tmp_path / "part")
    reranker.update_weights_from_disk(some, "some", subset=list(MLP))
    found = scores(reranker)
    mixture = mixed(old, new, MLP, tmp_path / "mixed")
    assert found == scores(start(mixture, **options("from_2_way_softmax")))


def with_score(folder: Path, seed: int, into: Path, *, has_bias: bool = False) -> Path:
    """The checkpoint in `folder`, with a score of three labels instead of its head."""
    shutil.copytree(folder, into)
    tensors = load_file(into / FILE)
    del tensors["lm_head.weight"]
    random = torch.Generator().manual_seed(seed)
    tensors["score.weight"] = torch.randn(3, 128, generator=random).bfloat16()
    if has_bias:
        tensors["score.bias"] = torch.randn(3, generator=random).bfloat16()
    save_file(tensors, into / FILE, metadata={"format": "pt"})
    config = json.loads((into / "config.json").read_text())
    labels = {"id2label": {str(i): str(i) for i in range(3)}}
    (into / "config.json").write_text(json.dumps(config | ARCHITECTURE | labels))
    return into


def test_a_classifier_with_a_score_of_its_own_equals_a_fresh_engine(
    start: Callable[..., Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old, new = (with_score(checkpoint(i), i, tmp_path / str(i)) for i in (0, 1))
    fresh = scores(start(new, **POOLING))
    llm = start(old, weight_transfer_config=OTHER, **POOLING)
    before = scores(llm)
    assert len(before[0]) == 3
    assert before != fresh
    # vLLM's loader takes a bias for the layer, and gives the layer that it loads one.
    extra = {"score.bias": "model.norm.weight"}
    error = is_refused(llm, new, {"extra": extra})
    assert "score.bias" in error.message
    (score,) = llm.collective_rpc(lambda w: w.vllm_inflight.stager.shadow.module.score)
    assert score.bias is not None
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert score.bias is None
        assert scores(llm) == fresh
        llm.rollback_weights()
        assert scores(llm) == before


def test_a_classifier_whose_loader_has_added_a_bias_is_served_and_not_updated(
    start: Callable[..., Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old, new = (
        with_score(checkpoint(i), i, tmp_path / str(i), has_bias=True) for i in (0, 1)
    )
    llm = start(old, **POOLING)
    before = scores(llm)
    with pytest.raises(StagingUnavailable, match=r"score gains or loses .*bias"):
        llm.update_weights_from_disk(str(new), "new")
    assert scores(llm) == before


def test_an_untested_kind_of_such_a_classifier_is_rejected_by_name() -> None:
    text = SimpleNamespace(classifier_from_token=["a"], method="of_tomorrow")
    hf = SimpleNamespace(get_text_config=lambda: text)
    model = SimpleNamespace(hf_config=hf, runner_type="pooling", quantization=None)
    live = torch.nn.Module()
    vars(live)[classifier.BASE_LOADER] = print
    config = SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(world_size=1)
    )
    assert "(of_tomorrow), by a method" in str(
        classifier.classifier_obstacle(live, config)
    )
    text.method = "no_post_processing"
    assert classifier.classifier_obstacle(live, config) is None
    config.parallel_config.world_size = 2
    assert "has not been tested on 2 ranks" in str(
        classifier.classifier_obstacle(live, config)
    )
