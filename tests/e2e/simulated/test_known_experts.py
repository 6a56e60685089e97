"""Hits in the prefix cache of requests that ask which experts computed their tokens.

From 0.33 on, vLLM reads how many leading tokens have known experts before the request
looks for KV. The number is of the namespace that the request was in by then.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, prompt, request
from tests.support.simulated.core import publish_weights

pytestmark = pytest.mark.engine


@pytest.mark.since("0.33.0")  # before, no hit is limited by known experts
def test_a_hit_is_as_long_as_experts_are_known_in_the_namespace_of_the_request(
    core: EngineCore,
) -> None:
    from vllm.distributed.aux_output_connector import connector

    text = prompt(9, 40)
    late, _ = core.preprocess_add_request(request("late", text))
    publish_weights(core, 1, "one")
    add(core, "first", text)
    Streams(core).run()
    scheduler: Any = core.scheduler
    experts = connector.AuxOutputSchedulerConnector(scheduler.kv_cache_manager)
    scheduler.aux_output_connector = experts
    try:
        before = experts.max_cache_hit(late)
        _, num_found, *_ = scheduler._get_local_prefix_cache_hit(late, before)
        assert (before, num_found) == (0, experts.max_cache_hit(late))
        assert num_found > 0
        _, unlimited, *_ = scheduler._get_local_prefix_cache_hit(late, None)
        assert unlimited == num_found
    finally:
        scheduler.aux_output_connector = None


@pytest.mark.since("0.31.0")  # before, nobody keeps which experts computed
def test_a_retracted_request_with_kv_from_elsewhere_ends_for_the_experts_too(
    core: EngineCore,
) -> None:
    scheduler: Any = core.scheduler
    ended: list[str] = []
    made, _ = core.preprocess_add_request(request("loaded", prompt(3)))
    scheduler.requests[made.request_id] = made
    scheduler.kv_holding_waiting.add_request(made)
    scheduler.aux_output_connector = SimpleNamespace(
        request_finished=lambda each: ended.append(each.request_id)
    )
    try:
        assert scheduler.vllm_inflight.retract() == 1
    finally:
        scheduler.aux_output_connector = None
    assert ended == ["loaded"]
    assert list(scheduler.waiting) == [made]
