"""Drafters and adapters replaced under CUDA graphs; needs one GPU."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest

from tests.e2e.test_adapter_loads import again, of_a_larger_model
from tests.e2e.test_adapters import adapted, said
from tests.support.engines.adapters import RANK, make_adapter
from tests.support.engines.drafted import Drafted, drafted
from tests.support.engines.mixtures import part
from tests.support.models.tiny_drafters import (
    GPU_MTP_KINDS,
    METHODS,
    MTP,
    MTP_KINDS,
    drafting,
    make_drafter,
    make_mtp,
)
from vllm.inflight.errors import EngineFault

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"family": "llama", "hidden": 256}
STAGINGS = "device", "host", "delta"
ALL_MTP_KINDS = MTP_KINDS | GPU_MTP_KINDS
SEEN = {"enforce_eager": False, "async_scheduling": False}
"""With CUDA graphs; and no step begins before the drafts of the last one are there."""


@pytest.fixture(scope="module", params=METHODS)
def drafter(
    request: pytest.FixtureRequest, old: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    root = tmp_path_factory.mktemp(request.param)
    folders = {n: make_drafter(root / f"{n}", n, old, request.param) for n in (5, 6)}

    def folder(seed: int) -> Path:
        return folders[seed]

    folder.method = request.param  # type: ignore[attr-defined]
    return folder


@pytest.fixture(scope="module")
def begin(
    start: Callable[..., Any], drafter: Callable[[int], Path]
) -> Callable[..., Any]:
    def engine(folder: Path, seed: int, **options: Any) -> Any:
        config = drafting(drafter.method, drafter(seed))  # type: ignore[attr-defined]
        return start(folder, speculative_config=config, **SEEN, **options)

    return engine


@pytest.fixture(scope="module")
def fresh(
    begin: Callable[..., Any], drafter: Callable[[int], Path], old: Path, new: Path
) -> dict[tuple[Path, int], Drafted]:
    """What engines say that have loaded nothing else."""
    found = {
        (path, seed): drafted(begin(path, seed))
        for path in (old, new)
        for seed in (5, 6)
    }
    assert len({str(drafts) for _, drafts in found.values()}) == len(found)
    return found


@pytest.mark.parametrize("staging", STAGINGS)
def test_model_and_drafter_equal_a_fresh_engines(
    begin: Callable[..., Any],
    drafter: Callable[[int], Path],
    fresh: dict[tuple[Path, int], Drafted],
    old: Path,
    new: Path,
    staging: str,
) -> None:
    inflight = {"staging": staging, "delta_gib": 0.1}
    options = {"additional_config": {"inflight": inflight}}
    llm = begin(old, 5, **options)
    served = old, 5
    assert drafted(llm) == fresh[served]
    for path, draft in ((new, None), (None, 6), (old, 5), (new, 6), (None, 5)):
        llm.update_weights_from_disk(
            path and str(path), "next", draft_path=draft and str(drafter(draft))
        )
        before, served = served, (path or served[0], draft or served[1])
        assert drafted(llm) == fresh[served]
        if staging != "host":
            llm.rollback_weights()
            assert drafted(llm) == fresh[before]
            llm.update_weights_from_disk(
                path and str(path), "again", draft_path=draft and str(drafter(draft))
            )
            assert drafted(llm) == fresh[served]


# ---------------------------------------------------------------- MTP layers
@pytest.mark.parametrize("name", ALL_MTP_KINDS)
def test_model_and_mtp_layers_equal_a_fresh_engines(
    start: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    kind = ALL_MTP_KINDS[name]
    folders = {
        labels: make_mtp(tmp_path / f"{labels}", kind, *labels, hidden=256)
        for labels in itertools.product((0, 1), (5, 6))
    }
    options: dict[str, Any] = {"speculative_config": MTP, **SEEN}
    backend = {"gdn_prefill_backend": "triton"} if name in GPU_MTP_KINDS else {}
    fresh = {
        labels: drafted(start(folder, additional_config=backend, **options))
        for labels, folder in folders.items()
    }
    assert len({str(drafts) for _, drafts in fresh.values()}) == len(fresh)
    for staging in STAGINGS:
        if staging == "delta" and name in GPU_MTP_KINDS:
            continue  # loaders of linear attention compute
        served = 0, 5
        added = {"inflight": {"staging": staging, "delta_gib": 0.2}, **backend}
        llm = start(folders[served], additional_config=added, **options)
        assert drafted(llm) == fresh[served]
        for labels, patterns in (
            ((1, 6), None),
            ((1, 5), (f"{kind.layer}*",)),
            ((0, 5), kind.model),
            ((1, 6), None),
            ((0, 5), None),
        ):
            folder = str(folders[labels])
            if patterns is not None:
                folder = part(folders[labels], patterns, tmp_path / "part")
            before, served = served, labels
            llm.update_weights_from_disk(folder, "next", subset=patterns)
            assert drafted(llm) == fresh[served]
            if staging != "host":
                llm.rollback_weights()
                assert drafted(llm) == fresh[before]
                llm.update_weights_from_disk(folder, "again", subset=patterns)
                assert drafted(llm) == fresh[served]


# ------------------------------------------------------------------ adapters
@pytest.fixture(scope="module")
def adapters(start: Callable[..., Any], old: Path) -> Iterator[Any]:
    yield start(
        old,
        enforce_eager=False,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=4,
    )


def test_an_adapter_is_replaced_or_stays_under_updates_of_the_base(
    adapters: Any, old: Path, new: Path, tmp_path: Path
) -> None:
    llm, adapter = adapters, make_adapter(old, tmp_path)
    first = said(llm, adapter)
    llm.update_weights_from_disk(str(new), "new")
    other = said(llm, adapter)
    assert other[1] not in (first[1], other[0])
    llm.rollback_weights()
    assert said(llm, adapter) == first
    make_adapter(old, tmp_path, seed=1)
    again(llm, adapter)
    second = adapted(llm, adapter)
    assert second != first[1]
    of_a_larger_model(Path(adapter.lora_path))
    with pytest.raises(EngineFault, match="no rank has it"):
        again(llm, adapter)
    assert adapted(llm, adapter) == second
    make_adapter(old, tmp_path)
    again(llm, LoRARequest(adapter.lora_name, 1, adapter.lora_path))
    assert said(llm, adapter) == first
