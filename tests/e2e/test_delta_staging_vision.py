"""Models that see, with delta staging: what fresh engines say of text and of pictures.

Where torchvision is not installed, the tests of those that want it are skipped.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.test_delta_staging import (  # noqa: F401 (one is a fixture)
    delta_engine,
    without_packing,
)
from tests.e2e.test_delta_staging_families import converted
from tests.support.deltas import stepped
from tests.support.engines.mixtures import said
from tests.support.engines.pictures import commits_rollbacks_and_a_tower, described
from tests.support.models.families_seen import DELTA, record
from tests.support.models.seeing import SEEING, require_torchvision
from vllm.inflight.trainer import Publisher

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOM = {"staging": "delta", "delta_gib": 0.2}


@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_equals_a_fresh_engine_after_whole_versions_and_a_delta(
    start: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    require_torchvision(name)
    begin = partial(delta_engine, start, inflight=ROOM)
    llm, new = commits_rollbacks_and_a_tower(begin, tmp_path, name)
    weights = load_file(new / "model.safetensors")
    before = said(llm), described(llm, name)
    with Publisher(llm, lambda: weights, delta="always") as to:
        to.publish("whole")
        kept = {key: weights[key] for key in converted(llm)}
        weights = stepped(weights, 1) | kept
        assert to.publish("delta").is_delta
        found = llm.weight_info()["digest"], said(llm), described(llm, name)
        to.rollback()
        assert (said(llm), described(llm, name)) == before
    with Publisher(llm, lambda: weights, delta="off") as to:
        to.publish("whole again")
    assert found == (llm.weight_info()["digest"], said(llm), described(llm, name))
    assert llm.verify_weights()["result"] == "equal"
    record(name, DELTA, "eager", result="equal", converted=len(kept))
