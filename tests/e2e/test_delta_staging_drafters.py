"""Delta staging with drafters: one set of weights of both, and one log.

The tests of test_drafters.py and test_mtp.py, and deltas of a model with its drafter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.test_delta_staging import (  # noqa: F401 (one is a fixture)
    delta_engine,
    shadow_of,
    without_packing,
)
from tests.e2e.test_drafters import (  # noqa: F401 (tests, run here with a log)
    SHAPE,
    Said,
    drafters,
    llm,
    method,
    options,
    said,
    test_a_drafter_alone_is_rejected_while_the_models_weights_are_gone,
    test_a_drafters_copy_of_a_shared_layer_is_passed_over,
    test_a_model_or_drafter_that_an_update_leaves_out_keeps_its_weights,
    test_an_incomplete_drafter_is_rejected_with_the_names_of_missing_tensors,
    test_model_and_drafter_are_updated_alone_or_together_and_rolled_back,
    test_requests_live_through_commits_of_both,
    test_tensors_unknown_to_a_drafter_are_rejected_by_name,
    test_the_digest_covers_the_model_without_its_drafter,
    test_upstreams_session_for_the_drafter_is_a_transaction,
)
from tests.support.deltas import stepped
from tests.support.engines.drafted import drafted
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

LOG = {"staging": "delta", "delta_gib": 0.05}


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Any],
    method: str,  # noqa: F811 (the fixture)
    said: Said,  # noqa: F811
    old: Path,
    drafters: dict[str, Path],  # noqa: F811
) -> Any:
    beside = options(method, drafters["old"])
    return delta_engine(start, old, inflight=LOG, **beside)


def test_the_places_of_the_drafters_tensors_are_proved_at_the_start(
    llm: Any,  # noqa: F811
) -> None:
    shadow = shadow_of(llm)
    assert shadow.has_drafter and not len(shadow.changed)
    assert shadow.plan.num_proved == len(shadow.plan) > 0
    assert all(param.is_meta for param in shadow.module.parameters())


def test_deltas_of_the_model_leave_the_drafter_and_are_rolled_back(
    llm: Any,  # noqa: F811
    said: Said,  # noqa: F811
    old: Path,
    drafters: dict[str, Path],  # noqa: F811
) -> None:
    bits = load_file(old / "model.safetensors")
    # As the engine serves them: a delta of other bits would not be one of what it has.
    weights = {name: tensor.float() for name, tensor in bits.items()}
    with Publisher(llm, lambda: weights) as to:
        to.publish("whole")
        assert drafted(llm) == said["old", "old"]
        weights = {n: t.float() for n, t in stepped(bits, 1, share=0.1).items()}
        assert to.publish("delta").is_delta
        after, digest = drafted(llm), llm.weight_info()["digest"]
        assert after != said["old", "old"]
        to.rollback()
        assert drafted(llm) == said["old", "old"]
        to.rollback()
        llm.update_weights_from_disk(None, "b", draft_path=str(drafters["new"]))
        llm.update_weights_from_disk(None, "a", draft_path=str(drafters["old"]))
        assert (drafted(llm), llm.weight_info()["digest"]) == (after, digest)
    with Publisher(llm, lambda: weights, delta="off") as to:
        to.publish("the same, whole")
    assert (drafted(llm), llm.weight_info()["digest"]) == (after, digest)
    assert llm.verify_weights()["result"] == "equal"
