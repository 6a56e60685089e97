"""Delta staging with MTP layers: a drafter whose tensors are among the model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.test_adopted_drafters import beside, of_folder
from tests.e2e.test_delta_staging import (  # noqa: F401 (one is a fixture)
    delta_engine,
    shadow_of,
    without_packing,
)
from tests.e2e.test_delta_staging_families import converted
from tests.support.deltas import stepped
from tests.support.engines.drafted import drafted
from tests.support.engines.mixtures import part
from tests.support.models.tiny_drafters import MTP_KINDS, make_mtp, mtp_options
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

LOG = {"staging": "delta", "delta_gib": 0.05}


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [
        ("mimo", False),
        ("mimo", True),
        pytest.param("glm", False, marks=pytest.mark.slow),
        pytest.param("deepseek", False, marks=pytest.mark.slow),
        pytest.param("glm-lite", False, marks=pytest.mark.slow),
    ],
)
def test_model_and_mtp_layer_change_together_or_alone_by_deltas_and_whole(
    start: Callable[..., Any], tmp_path: Path, name: str, is_tied: bool
) -> None:
    kind = MTP_KINDS[name]
    options = mtp_options(kind.family)
    old, new = (
        make_mtp(tmp_path / str(seed), kind, seed, 5 + seed, tied=is_tied)
        for seed in range(2)
    )
    fresh = drafted(start(new, **options))
    llm = delta_engine(start, old, inflight=LOG, **options)
    shadow = shadow_of(llm)
    assert shadow.plan.num_proved == len(shadow.plan) > 0
    first = drafted(llm)
    assert first != fresh
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert drafted(llm) == fresh
        llm.rollback_weights()
        assert drafted(llm) == first
    only = [f"{kind.layer}*"]
    llm.update_weights_from_disk(part(new, only, tmp_path / "part"), "mtp", subset=only)
    assert drafted(llm)[0] == first[0] and drafted(llm)[1] != first[1]
    llm.rollback_weights()
    assert drafted(llm) == first

    weights = load_file(old / "model.safetensors")
    with Publisher(llm, lambda: weights) as to:
        to.publish("whole")
        # An MTP layer's copy of the model's embedding fills nothing.
        idle = {kind.layer + name for name in kind.copies}
        kept = {name: weights[name] for name in idle | converted(llm)}
        weights = stepped(weights, 1) | kept
        assert to.publish("delta").is_delta
        after = drafted(llm), llm.weight_info()["digest"]
        to.rollback()
        assert drafted(llm) == first
    with Publisher(llm, lambda: weights, delta="off") as to:
        to.publish("the same, whole")
    assert (drafted(llm), llm.weight_info()["digest"]) == after
    assert llm.verify_weights()["result"] == "equal"


@pytest.mark.parametrize("name", ["mimo", pytest.param("glm", marks=pytest.mark.slow)])
def test_a_frameworks_version_has_mtp_layers_or_leaves_them_as_they_are(
    start: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    kind = MTP_KINDS[name]
    options = beside(**mtp_options(kind.family))
    seeds = {"old": (0, 5), "new": (1, 6), "model": (1, 5)}
    folders = {n: make_mtp(tmp_path / n, kind, *of) for n, of in seeds.items()}
    fresh = {n: drafted(start(folder, **options)) for n, folder in folders.items()}
    llm = delta_engine(start, folders["old"], inflight=LOG, **options)
    own = part(folders["new"], kind.model, tmp_path / "own")
    for label, sent in (("new", folders["new"]), ("model", Path(own))):
        of_folder(llm, sent)
        assert drafted(llm) == fresh[label]
        llm.rollback_weights()
        assert drafted(llm) == fresh["old"]
