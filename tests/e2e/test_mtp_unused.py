"""MTP layers of a checkpoint where nobody drafts with them; and what is read of them
where somebody does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.engines.bare_core import call
from tests.support.engines.mixtures import part
from tests.support.engines.probe import greedy
from tests.support.models.families import cpu_options
from tests.support.models.tiny_drafters import MTP_KINDS, MtpKind, make_mtp, mtp_options
from vllm.inflight.errors import StagingUnavailable, WeightsMismatch

pytestmark = pytest.mark.engine

QUICK = ("mimo", "glm")
"""Layers of their own, and one behind the last."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in MTP_KINDS
    ]
)
def kind(request: pytest.FixtureRequest) -> MtpKind:
    return MTP_KINDS[request.param]


@pytest.fixture
def folders(kind: MtpKind, tmp_path: Path) -> list[Path]:
    return [make_mtp(tmp_path / f"{n}", kind, n, 5 + n) for n in (0, 1)]


@pytest.fixture
def begin(start: Callable[..., Any], kind: MtpKind) -> Callable[..., Any]:
    def engine(folder: Path, **options: Any) -> Any:
        usual = {"dtype": "float32", **cpu_options(kind.family)}
        return start(folder, **usual | options)

    return engine


def test_unused_mtp_layers_may_come_in_a_whole_checkpoint_but_not_alone(
    begin: Callable[..., Any], kind: MtpKind, folders: list[Path], tmp_path: Path
) -> None:
    old, new = folders
    fresh = greedy(begin(new))
    llm = begin(old)
    before = greedy(llm)
    assert before != fresh
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert greedy(llm) == fresh
        llm.rollback_weights()
    layer = [f"{kind.layer}*"]
    with pytest.raises(WeightsMismatch, match=kind.layer):
        llm.update_weights_from_disk(part(new, layer, tmp_path), "mtp", subset=layer)
    assert greedy(llm) == before


def test_mtp_layers_that_draft_are_read_by_their_checkpoint_names(
    begin: Callable[..., Any], kind: MtpKind, folders: list[Path]
) -> None:
    old, new = folders
    llm = begin(old, **mtp_options(kind.family))
    llm.update_weights_from_disk(str(new), "new")
    core = llm.llm_engine.engine_core.engine_core
    tensors = load_file(new / "model.safetensors")
    for end in (kind.joint, f"{kind.block}self_attn.o_proj.weight"):
        rows = call(core, "rows", tensor=kind.layer + end, num_rows=3)["rows"]
        assert rows == tensors[kind.layer + end][:3].float().tolist()


def test_updates_are_rejected_if_the_mtp_layers_come_from_another_checkpoint(
    begin: Callable[..., Any], kind: MtpKind, folders: list[Path]
) -> None:
    old, new = map(str, folders)
    drafts = mtp_options(kind.family)["speculative_config"]
    llm = begin(Path(old), speculative_config=drafts | {"model": new})
    with pytest.raises(StagingUnavailable, match="are not its model's own"):
        llm.update_weights_from_disk(old, "no")
