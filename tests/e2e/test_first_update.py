"""The first update of an engine with two sets of weights is replayed, and not loaded.

The plan was recorded and proved when the engine started. The engines here have shadow
parameters, as on a GPU. What is served equals a fresh engine; where a loader computes
and where layers are quantised, these tensors are loaded.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_adapters import (  # noqa: F401 (a fixture)
    ADAPTERS,
    adapter,
)
from tests.e2e.test_adapters import said as adapted
from tests.e2e.test_adopted_by_hand import facts, halves
from tests.e2e.test_delta_staging import shadow_of
from tests.e2e.test_tied_heads import with_head
from tests.support.deltas import stepped
from tests.support.engines.drafted import drafted
from tests.support.engines.mirrored import mirrored
from tests.support.engines.mixtures import MLP, mixed, part, said
from tests.support.engines.probe import greedy
from tests.support.engines.script import run_script
from tests.support.frameworks.by_hand import SENT, AReaL, PrimeRLFiles
from tests.support.models.families import (
    FAMILIES,
    UNPROVED,
    WANT_TORCHVISION,
    cpu_options,
)
from tests.support.models.tiny_drafters import (
    METHODS,
    MTP_KINDS,
    drafting,
    make_drafter,
    make_mtp,
    mtp_options,
)
from tests.support.waiting import until
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.trainer import Publisher
from vllm.inflight.worker.staging.loader import UpdateLoader

pytestmark = pytest.mark.engine

FILE = "model.safetensors"
QUICK = {"gpt2": 0, "phi3": 0, "mixtral": 0, "deepseek_v3": 0}
"""Families, and how many tensors of their first update are loaded: turned matrices,
matrices fused in the checkpoint, experts, latent attention."""

NOT_HERE = ("falcon_h1", "granite_moe_hybrid", "mamba2", "nemotron_h", "gpt_oss")
"""The loaders of the first four do not take their convolutions here. The experts of the
last differ from a fresh engine here, with a record of the start or without; the reason
is not known. test_in_place_loaders.py plays all five."""


@pytest.fixture(scope="module", autouse=True)
def with_shadow_parameters() -> Iterator[None]:
    with mirrored():
        yield


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that updates have given to the model's own loader."""
    found: list[str] = []
    load = UpdateLoader._load

    def noted(weights: Iterable[Any]) -> Iterator[Any]:
        for name, tensor in weights:
            found.append(name)
            yield name, tensor

    monkeypatch.setattr(
        UpdateLoader, "_load", lambda self, weights: load(self, noted(weights))
    )
    return found


def engine(start: Callable[..., Any], folder: Path, **options: Any) -> Any:
    options.setdefault("weight_transfer_config", WeightTransferConfig(backend="local"))
    llm = start(folder, **options)
    plan = shadow_of(llm).plan
    assert plan.is_replayed and plan.num_proved == len(plan) > 0
    return llm


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in FAMILIES
        if name not in (*UNPROVED, *WANT_TORCHVISION, *NOT_HERE)
    ],
)
def test_the_first_update_of_a_family_is_replayed_and_equals_a_fresh_engine(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    loaded: list[str],
    family: str,
) -> None:
    options = cpu_options(family)
    old, new = (checkpoint(seed, family=family) for seed in (0, 1))
    fresh = said(start(new, **options))
    llm = engine(start, old, **options)
    num_proved = shadow_of(llm).plan.num_proved
    before = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert len(loaded) == QUICK.get(family, len(loaded))
    num_loaded = len(set(loaded))
    assert said(llm) == fresh
    llm.update_weights_from_disk(str(old), "old")
    assert greedy(llm) == before
    # No later update replays more than the first one did.
    assert shadow_of(llm).plan.num_proved == num_proved
    assert len(loaded) == 2 * num_loaded


def test_the_first_version_is_read_back_unasked(
    start: Callable[..., Any], old: Path, new: Path
) -> None:
    """It is the first one that a replay has made."""
    llm = engine(start, old)
    assert llm.weight_info()["scrub"] is None
    llm.update_weights_from_disk(str(new), "new")
    until(lambda: llm.weight_info()["scrub"] is not None)
    assert llm.weight_info()["scrub"]["result"] == "equal"


def test_a_first_subset_is_replayed_beside_what_is_served(
    start: Callable[..., Any], old: Path, new: Path, tmp_path: Path, loaded: list[str]
) -> None:
    fresh = said(start(mixed(old, new, MLP, tmp_path / "mixed")))
    llm = engine(start, old)
    before = said(llm)
    some = part(new, MLP, tmp_path / "part")
    llm.update_weights_from_disk(some, "some", subset=MLP)
    assert said(llm) == fresh and loaded == []
    llm.rollback_weights()
    assert said(llm) == before


def test_after_a_damaged_first_update_nothing_has_changed_and_the_next_one_works(
    start: Callable[..., Any], old: Path, new: Path, tmp_path: Path, loaded: list[str]
) -> None:
    fresh = said(start(new))
    llm = engine(start, old)
    before = said(llm)
    tensors = load_file(new / FILE)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight"):
        llm.update_weights_from_disk(str(tmp_path), "damaged")
    assert said(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert said(llm) == fresh and loaded == []


def test_the_first_delta_is_written_element_by_element(
    start: Callable[..., Any], old: Path, tmp_path: Path, loaded: list[str]
) -> None:
    """Nothing was loaded before it: the first publish is whole, and replayed."""
    weights = load_file(old / FILE)
    after = stepped(weights, 1)
    folder = mixed(old, old, (), tmp_path / "after")
    save_file(after, folder / FILE, metadata={"format": "pt"})
    fresh = said(start(folder))
    llm = engine(start, old)
    with Publisher(llm, lambda: weights) as to:
        assert not to.publish("whole").is_delta
        weights = after
        assert to.publish("delta").is_delta
    assert said(llm) == fresh and loaded == []


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_tied_head_of_the_first_update(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    loaded: list[str],
    is_copy: bool,
) -> None:
    old, new = (
        with_head(tmp_path / str(n), checkpoint(n, tied=True), is_copy=is_copy)
        for n in (0, 1)
    )
    fresh = said(start(new))
    llm = engine(start, old)
    llm.update_weights_from_disk(str(new), "new")
    assert said(llm) == fresh and loaded == []


def test_layers_with_adapters_are_replayed(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    adapter: Any,  # noqa: F811 (the fixture)
    loaded: list[str],
) -> None:
    fresh = adapted(start(new, **ADAPTERS), adapter)
    llm = engine(start, old, **ADAPTERS)
    llm.update_weights_from_disk(str(new), "new")
    assert adapted(llm, adapter) == fresh and loaded == []


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_is_replayed_alone_and_with_its_model(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    loaded: list[str],
    method: str,
) -> None:
    old, new = (checkpoint(seed, family="llama") for seed in (0, 1))
    drafts = [make_drafter(tmp_path / str(n), 5 + n, old, method) for n in (0, 1)]
    both = [
        {"dtype": "float32", "speculative_config": drafting(method, draft)}
        for draft in drafts
    ]
    fresh = drafted(start(old, **both[1])), drafted(start(new, **both[1]))
    llm = engine(start, old, **both[0])
    llm.update_weights_from_disk(None, "drafter", draft_path=str(drafts[1]))
    assert drafted(llm) == fresh[0]
    llm.update_weights_from_disk(str(new), "model")
    assert drafted(llm) == fresh[1]
    # A drafter's loader makes a tensor of the name of its model's embedding.
    plan = shadow_of(llm).plan
    assert not {name for name in loaded if plan.known(name) is not None}


def test_an_mtp_layer_is_replayed_with_its_model(
    start: Callable[..., Any], tmp_path: Path, loaded: list[str]
) -> None:
    kind = MTP_KINDS["mimo"]
    options = mtp_options(kind.family)
    old, new = (make_mtp(tmp_path / str(n), kind, n, 5 + n, tied=False) for n in (0, 1))
    fresh = drafted(start(new, **options))
    llm = engine(start, old, **options)
    llm.update_weights_from_disk(str(new), "new")
    assert drafted(llm) == fresh
    assert set(loaded) <= {kind.layer + name for name in kind.copies}


def test_quantised_layers_are_loaded_and_all_others_replayed(
    start: Callable[..., Any], checkpoint: Callable[..., Path], loaded: list[str]
) -> None:
    old, new = (checkpoint(n, "fp8-channel", family="qwen2") for n in (0, 1))
    fresh = said(start(new))
    llm = engine(start, old)
    shadow = shadow_of(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert said(llm) == fresh
    assert loaded
    for name in loaded:
        assert shadow.places.params_of(name) & shadow.quantised, name


class Extension(PrimeRLFiles, AReaL):
    """The calls of two frameworks."""


@pytest.mark.parametrize("is_in_buckets", [False, True])
def test_a_frameworks_update_that_comes_first_is_replayed(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    loaded: list[str],
    is_in_buckets: bool,
) -> None:
    fresh = said(start(new))
    name = f"{__name__}.{Extension.__name__}"
    llm = engine(start, old, worker_extension_cls=name)
    if is_in_buckets:
        for some in halves(load_file(new / FILE)):
            SENT.extend(some.items())
            llm.collective_rpc("areal_set_weight_meta", args=(*facts(some), "update"))
            assert llm.collective_rpc("areal_update_weight_xccl")[0][0]
    else:
        llm.collective_rpc("update_weights_from_path", args=(str(new),))
    assert said(llm) == fresh and loaded == []


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", "{}"),
        pytest.param("mixtral", '{"enable_expert_parallel": true}'),
    ],
)
def test_two_ranks_replay_their_first_update(
    checkpoint: Callable[..., Path], family: str, options: str
) -> None:
    old, new = (checkpoint(seed, family=family) for seed in (0, 1))
    seen = run_script("first_update_ranks", old, new, options)
    assert seen["updated"] == seen["fresh"] != seen["before"]
    assert seen["num_loaded"] == [0, 0]
    assert min(seen["num_proved"]) > 0


def test_what_was_imported_before_the_plugins_loads_in_place_too(
    old: Path, new: Path, tmp_path: Path
) -> None:
    """A transport and an extension have imported upstream's layerwise reload by name.

    The start checkpoint has no tensors, so nothing is recorded at the start.
    """
    empty = tmp_path / "empty"
    shutil.copytree(old, empty, ignore=shutil.ignore_patterns(FILE))
    cast = mixed(new, new, (), tmp_path / "cast")
    tensors = load_file(new / FILE)
    shard = "model.layers.0.self_attn.q_proj.weight"
    tensors[shard] = tensors[shard].float()
    save_file(tensors, cast / FILE, metadata={"format": "pt"})
    seen = run_script("early_transport", old, new, empty, cast)
    assert seen["is_early"] and seen["old"] != seen["new"]
    assert seen["first"] == seen["new"]
    assert seen["adopted"] == seen["old"]
    assert seen["from disk"] == seen["new"]
    assert seen["failed"] == ["RuntimeError: the wire broke", seen["new"]]
    assert seen["after a failure"] == seen["old"]
    assert seen["cast"] == seen["new"]
    assert seen["last"] == seen["old"]
    # What keeps upstream's functions where nobody finds them is rejected by name.
    error, says = seen["kept by a transport"]
    assert "initialize_layerwise_reload" in error and "set aside" in error
    assert says == seen["old"]
    error, says = seen["kept by an extension"]
    assert "embed_tokens.weight of the shadow model" in error
    assert says == seen["old"]
    assert seen["after what was kept"] == seen["new"]
