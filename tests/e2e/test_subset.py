"""Updates of a declared subset: what is served then is the mixture, to the byte."""

from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engines.mixtures import (
    EMBEDDING,
    HEAD,
    MLP,
    NORMS,
    behind,
    declared,
    mixed,
    part,
    said,
)
from tests.support.engines.probe import outputs_during, send
from vllm.inflight.errors import (
    EngineFault,
    Malformed,
    VersionConflict,
    WeightsMismatch,
)

pytestmark = pytest.mark.engine

Said = tuple[list[list[int]], dict[str, str]]
PACKS = {"dtype": "float32"}
"""So that every machine packs its weights: not all can in bf16."""
MIXTURES: tuple[tuple[str, ...], ...] = (MLP, EMBEDDING, NORMS, HEAD, MLP + NORMS)


@pytest.fixture(scope="module")
def mixtures(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, ...], tuple[Path, Said]]:
    """By the patterns of what is new: the checkpoint, and what a fresh engine says."""
    root = tmp_path_factory.mktemp("mixtures")
    folders = {p: mixed(old, new, p, root / str(n)) for n, p in enumerate(MIXTURES)}
    return {p: (folder, said(start(folder, **PACKS))) for p, folder in folders.items()}


@pytest.fixture(scope="module")
def wholes(
    start: Callable[..., Any], mixtures: Any, old: Path, new: Path
) -> tuple[Said, Said]:
    """What engines started on the old and on the new weights say."""
    del mixtures  # their engines start before
    return said(start(old, **PACKS)), said(start(new, **PACKS))


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], mixtures: Any, wholes: Any, old: Path) -> Any:
    """An engine on the old weights, once the fresh ones are gone."""
    from vllm.config.weight_transfer import WeightTransferConfig

    transport = WeightTransferConfig(backend="other")
    return start(old, weight_transfer_config=transport, **PACKS)


@pytest.fixture
def replace(llm: Any, new: Path, tmp_path: Path) -> Callable[..., Any]:
    """`replace(patterns, label)`: serve these tensors of the new checkpoint."""

    def update(
        patterns: Sequence[str], label: str | None = None, **options: Any
    ) -> Any:
        folder = part(new, patterns, tmp_path / "part")
        return llm.update_weights_from_disk(
            folder, label, subset=list(patterns), **options
        )

    return update


# -------------------------------------------- on the weights of the start, first
def test_a_subset_on_the_start_weights_has_no_known_digest_or_drift(
    engine: Any, new: Path, mixtures: Any, tmp_path: Path
) -> None:
    folder = part(new, MLP, tmp_path)
    for _ in range(2):
        reply = engine.update_weights_from_disk(folder, "mlp", subset=list(MLP))
        assert (reply["digest"], reply["drift"]) == (None, None)
        assert said(engine) == mixtures[MLP][1]
    assert engine.weight_info()["digest"] is None


# ----------------------------------------------------------------------- success
@pytest.mark.parametrize("patterns", MIXTURES, ids=lambda p: p[0])
def test_a_subset_equals_a_fresh_engine_on_the_mixture(
    llm: Any, replace: Any, mixtures: Any, patterns: tuple[str, ...]
) -> None:
    folder, expected = mixtures[patterns]
    reply = replace(patterns, "mixture")
    assert said(llm) == expected
    assert llm.weight_info()["digest"] == reply["digest"]
    assert llm.get_weight_version() == "mixture"
    # Told from the whole version, not from what came.
    llm.rollback_weights()
    whole = llm.update_weights_from_disk(str(folder))
    assert (reply["digest"], reply["drift"]) == (whole["digest"], whole["drift"])


def test_two_subsets_in_a_row_add_up(llm: Any, replace: Any, mixtures: Any) -> None:
    replace(MLP)
    replace(NORMS)
    folder, expected = mixtures[MLP + NORMS]
    assert said(llm) == expected
    digest = llm.weight_info()["digest"]
    assert llm.update_weights_from_disk(str(folder))["digest"] == digest


def test_a_subset_copies_only_what_it_and_the_commit_before_it_changed(
    llm: Any, replace: Any
) -> None:
    replace(MLP)
    mlp = behind(llm)
    assert mlp == {
        f"model.layers.{layer}.mlp.{name}.weight"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
    }
    replace(("model.norm.weight",))
    assert behind(llm) == {"model.norm.weight"}


def test_upstream_logs_no_warning_for_layers_that_a_subset_leaves_out(
    llm: Any, replace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    warned: list[Any] = []
    monkeypatch.setattr(layerwise.logger, "warning", lambda *said: warned.append(said))
    replace(MLP)
    assert warned == []


def test_a_subset_after_a_whole_update_keeps_the_other_tensors_of_that_update(
    llm: Any, replace: Any, old: Path, new: Path, wholes: Any, tmp_path: Path
) -> None:
    llm.update_weights_from_disk(str(new))
    replace(MLP)
    assert said(llm) == wholes[1]
    back = part(old, MLP, tmp_path / "back")
    llm.update_weights_from_disk(back, subset=list(MLP))
    replace(MLP)
    assert said(llm) == wholes[1]


@pytest.mark.parametrize("fault", [{"fail_after": 9}, {"poison": "model.norm.weight"}])
def test_a_subset_after_a_failed_update_is_served_correctly(
    llm: Any, replace: Any, new: Path, mixtures: Any, fault: dict[str, Any]
) -> None:
    llm.start_weight_update()
    with pytest.raises((EngineFault, WeightsMismatch)):
        send(llm, new, **fault)
        llm.finish_weight_update()
    replace(NORMS)
    assert said(llm) == mixtures[NORMS][1]


def test_a_subset_after_an_abort_of_a_staged_subset_is_served_correctly(
    llm: Any, replace: Any, new: Path, mixtures: Any
) -> None:
    replace(MLP)
    llm.start_weight_update(manifest={"format": 1, "subset": ["lm_head.*"]})
    send(llm, new, names=["lm_head.weight"])
    with pytest.raises(VersionConflict):
        llm.finish_weight_update(expect_version="another")
    llm.abort_weight_update()
    replace(NORMS)
    assert said(llm) == mixtures[MLP + NORMS][1]


def test_a_subset_after_a_rollback_is_served_correctly(
    llm: Any, replace: Any, new: Path, mixtures: Any, wholes: Any
) -> None:
    llm.update_weights_from_disk(str(new))
    llm.rollback_weights()
    replace(MLP)
    llm.rollback_weights()
    replace(NORMS)
    assert said(llm) == mixtures[NORMS][1]
    llm.rollback_weights()
    assert said(llm) == wholes[0]


def test_a_subset_is_rolled_back_as_any_version(
    llm: Any, replace: Any, mixtures: Any, wholes: Any
) -> None:
    before = llm.weight_info()
    replace(MLP, "mlp")
    llm.rollback_weights()
    assert said(llm) == wholes[0]
    info = llm.weight_info()
    assert (info["weight_version"], info["digest"]) == ("old", before["digest"])
    llm.rollback_weights("mlp")
    assert said(llm) == mixtures[MLP][1]


def test_a_whole_update_after_a_subset_is_whole(
    llm: Any, replace: Any, old: Path, new: Path, wholes: Any
) -> None:
    replace(MLP)
    llm.update_weights_from_disk(str(new))
    assert said(llm) == wholes[1]
    replace(EMBEDDING)
    llm.update_weights_from_disk(str(old))
    assert said(llm) == wholes[0]
    with pytest.raises(WeightsMismatch, match="missing"):
        llm.start_weight_update()
        send(llm, new, names=["model.norm.weight"])
        llm.finish_weight_update()


def test_subsets_can_be_committed_while_requests_run(
    llm: Any, replace: Any, old: Path, mixtures: Any
) -> None:
    def work() -> None:
        for _ in range(3):
            replace(MLP)
            replace(NORMS)
            llm.update_weights_from_disk(str(old))
        replace(HEAD)

    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    outputs = outputs_during(work, llm, 8, repeat(sampling))
    assert {len(o.outputs[0].token_ids) for o in outputs} == {200}
    assert any(len(o.outputs[0].weight_versions) > 1 for o in outputs)
    assert said(llm) == mixtures[HEAD][1]


def test_a_foreign_transport_can_bring_a_subset(
    llm: Any, new: Path, mixtures: Any
) -> None:
    names = sorted(declared(new, MLP))
    llm.start_weight_update(manifest={"format": 1, "subset": list(MLP)})
    for name in names:
        send(llm, new, names=[name])
    llm.finish_weight_update()
    assert said(llm) == mixtures[MLP][1]


def test_a_subset_is_accepted_only_on_its_base_version(llm: Any, replace: Any) -> None:
    with pytest.raises(VersionConflict, match="base_version"):
        replace(MLP, base_version="another")
    assert replace(MLP, "mlp", base_version="old")["weight_version"] == "mlp"


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("patterns", "names", "named", "said_of_it"),
    [
        (["*.mlp.*"], ["model.norm.weight"], "model.norm.weight", "no pattern"),
        (["*.q_proj.*"], ["model.layers.0.self_attn.q_proj.weight"], None, "missing"),
        (["*.mlp.*", "vision.*"], [], "vision.*", "no tensor matches"),
        (["*.mlp.*"], [], "*.mlp.*", "nothing was sent"),
        (["*"], ["model.layers.1.mlp.up_proj.weight"], None, "missing"),
    ],
    ids=["undeclared", "a part of qkv", "a strange pattern", "nothing", "half"],
)
def test_an_undeclared_or_incomplete_subset_is_rejected_by_name(
    llm: Any,
    replace: Any,
    new: Path,
    wholes: Any,
    mixtures: Any,
    patterns: list[str],
    names: list[str],
    named: str | None,
    said_of_it: str,
) -> None:
    llm.start_weight_update(manifest={"format": 1, "subset": patterns})
    with pytest.raises(WeightsMismatch, match=said_of_it) as caught:
        send(llm, new, names=names)
        llm.finish_weight_update()
    if named is None:
        named = {"q": "k_proj", "u": "gate_proj"}[names[0].split(".")[-2][0]]
        named = names[0].replace(names[0].split(".")[-2], named)
    assert named in caught.value.tensors
    assert said(llm) == wholes[0]
    replace(NORMS)
    assert said(llm) == mixtures[NORMS][1]


def test_an_invalid_list_of_subset_patterns_is_malformed(llm: Any) -> None:
    for subset in ([], "*", [3], [""], ["x" * 513], ["x"] * 1025):
        with pytest.raises(Malformed, match="subset"):
            llm.start_weight_update(manifest={"format": 1, "subset": subset})
