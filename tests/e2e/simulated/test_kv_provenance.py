"""Whose KV a request reads: each way in which old KV could reach a new request.

Every way is walked twice: as it is, and without our salt, where the same steps must
read stale KV, or the way would show nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt, request
from tests.support.simulated.core import publish_weights
from tests.support.simulated.load import KINDS, ask
from vllm.inflight.engine.scheduling.kv_provenance import trail_of
from vllm.inflight.engine.scheduling.prefix_cache import NamespacePolicy
from vllm.inflight.engine.scheduling.request_state import (
    CacheNamespace,
    RequestState,
)

pytestmark = pytest.mark.engine

TEXT = prompt(1, 90)


class Unsalted(NamespacePolicy):
    """Upstream's prefix cache, which knows nothing of weights."""

    def roots(
        self, epoch: int, load: int = 0, *, is_retracted: bool = False
    ) -> tuple[CacheNamespace]:
        return (CacheNamespace(0),)


@pytest.fixture(params=["one group", "two groups, sliding window", "async"])
def core(make: Callable[..., EngineCore], request: Any) -> Iterator[EngineCore]:
    core = make(**KINDS.get(request.param, {}))
    policy = core.scheduler.vllm_inflight.policy
    yield core
    core.scheduler.vllm_inflight.policy = policy


def run(core: EngineCore, name: str, text: list[int], **params: Any) -> Streams:
    add(core, name, text, **({"max_tokens": 3} | params))
    return Streams(core).run()


def given(core: EngineCore, name: str, *, salt: str, lora: str) -> None:
    """A request with a salt of its user's, and an adapter."""
    made = request(name, TEXT, max_tokens=3)
    made.cache_salt, made.lora_request = salt, LoRARequest(lora, 1, "/nowhere")
    core.add_request(*core.preprocess_add_request(made))


# Each leaves weights 1 live and has the request "probe" look for KV of TEXT.


def after_a_commit(core: EngineCore) -> None:
    run(core, "first", TEXT)
    publish_weights(core, 1, "one")
    run(core, "probe", TEXT)


def hashed_before_the_commit_and_admitted_after_it(core: EngineCore) -> None:
    run(core, "first", TEXT)
    hashed = core.preprocess_add_request(request("probe", TEXT, max_tokens=3))
    publish_weights(core, 1, "one")
    core.add_request(*hashed)
    Streams(core).run()


def waiting_at_the_commit(core: EngineCore) -> None:
    run(core, "first", TEXT)
    ask(core, "pause", mode="in_place")
    add(core, "probe", TEXT, max_tokens=3)
    publish_weights(core, 1, "one")
    call(core, "resume")
    Streams(core).run()


def retracted_by_the_commit(core: EngineCore) -> None:
    add(core, "probe", TEXT, max_tokens=30)
    streams = Streams(core).step(8)
    publish_weights(core, 1, "one", mode="retract")
    streams.run()


def retracted_by_a_pause_before_the_commit(core: EngineCore) -> None:
    add(core, "probe", TEXT, max_tokens=30)
    streams = Streams(core).step(8)
    ask(core, "pause", mode="retract")
    streams.step(3)
    publish_weights(core, 1, "one")
    call(core, "resume")
    streams.run()


def after_a_rollback(core: EngineCore) -> None:
    """Filled under weights 1, then 0; the probe comes when 1 are back."""
    publish_weights(core, 1, "one")
    add(core, "mixed", TEXT, max_tokens=60)
    streams = Streams(core).step(1)  # in the middle of its prompt
    publish_weights(core, 0, "default")
    streams.run()
    call(core, "rollback")
    run(core, "probe", TEXT + streams.tokens["mixed"])


def with_an_adapter_and_a_salt_of_the_user(core: EngineCore) -> None:
    given(core, "first", salt="mine", lora="a")
    Streams(core).run()
    publish_weights(core, 1, "one")
    given(core, "probe", salt="mine", lora="a")
    Streams(core).run()


def behind_a_block_that_is_not_full(core: EngineCore) -> None:
    run(core, "first", TEXT[:41], max_tokens=30)
    publish_weights(core, 1, "one")
    run(core, "probe", TEXT[:41])


WAYS = [
    after_a_commit,
    hashed_before_the_commit_and_admitted_after_it,
    waiting_at_the_commit,
    retracted_by_the_commit,
    retracted_by_a_pause_before_the_commit,
    after_a_rollback,
    with_an_adapter_and_a_salt_of_the_user,
    behind_a_block_that_is_not_full,
]


def read_by(core: EngineCore, name: str) -> set[int]:
    """The weights whose KV a request read for its last token."""
    return set(core.model_executor.sampled[name][-1].kv)


@pytest.mark.parametrize("way", WAYS)
def test_no_request_reads_kv_of_earlier_weights(
    core: EngineCore, way: Callable[[EngineCore], None]
) -> None:
    way(core)
    assert core.model_executor.live == 1
    assert read_by(core, "probe") == {1}


@pytest.mark.parametrize("way", WAYS)
def test_every_tested_path_reads_stale_kv_without_our_salt(
    core: EngineCore, way: Callable[[EngineCore], None]
) -> None:
    core.scheduler.vllm_inflight.policy = Unsalted()
    way(core)
    assert 0 in read_by(core, "probe")


@pytest.mark.parametrize("way", WAYS[:3])
def test_the_shared_policy_reads_old_kv_as_upstream_does(
    core: EngineCore, way: Callable[[EngineCore], None]
) -> None:
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("shared")
    way(core)
    assert 0 in read_by(core, "probe")


@pytest.mark.parametrize("way", WAYS[3:5])
def test_the_shared_policy_recomputes_the_kv_of_retracted_requests(
    core: EngineCore, way: Callable[[EngineCore], None]
) -> None:
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("shared")
    way(core)
    assert read_by(core, "probe") == {1}


def test_two_users_and_two_adapters_stay_apart_across_a_commit(
    core: EngineCore,
) -> None:
    publish_weights(core, 1, "one")
    given(core, "first", salt="mine", lora="a")
    Streams(core).run()
    for name, salt, lora, num_found in (
        ("same", "mine", "a", 80),
        ("other user", "yours", "a", 0),
        ("other adapter", "mine", "b", 0),
    ):
        given(core, name, salt=salt, lora=lora)
        probe = core.scheduler.requests[name]
        Streams(core).run()
        assert RequestState.of(probe).num_found == num_found


# ------------------------------------------------------------- bounded staleness
@pytest.mark.parametrize(("commits", "reads"), [(0, {0}), (1, {0, 1}), (2, {0, 2})])
def test_kv_up_to_k_updates_old_may_be_read(
    core: EngineCore, commits: int, reads: set[int]
) -> None:
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("versioned:2")
    run(core, "first", TEXT)
    for weights in range(1, commits + 1):
        publish_weights(core, weights, f"v{weights}")
    run(core, "probe", TEXT)
    assert read_by(core, "probe") == reads


def test_kv_more_than_k_updates_old_may_not(core: EngineCore) -> None:
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("versioned:2")
    run(core, "first", TEXT)
    for weights in (1, 2, 3):
        publish_weights(core, weights, f"v{weights}")
    run(core, "probe", TEXT)
    assert read_by(core, "probe") == {3}


def test_a_chain_of_blocks_has_the_age_of_its_root(core: EngineCore) -> None:
    """Blocks that a long request filled lately hang under the root it began with."""
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("versioned:1")
    add(core, "long", TEXT, max_tokens=100)
    streams = Streams(core).step(8)
    publish_weights(core, 1, "one")
    streams.run()
    text = TEXT + streams.tokens["long"]
    run(core, "one behind", text)
    assert read_by(core, "one behind") == {0, 1}
    publish_weights(core, 2, "two")
    run(core, "two behind", text)
    assert read_by(core, "two behind") == {2}


def test_the_root_with_the_longest_prefix_hit_is_chosen(core: EngineCore) -> None:
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("versioned:2")
    run(core, "first", TEXT)
    publish_weights(core, 1, "one")
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("versioned")
    run(core, "second", TEXT[:40])
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("versioned:2")
    run(core, "probe", TEXT)
    assert read_by(core, "probe") == {0, 1}
    first = core.model_executor.sampled["probe"][0].kv
    assert first[:80] == (0,) * 80, "the longer one is older"


def test_a_retracted_request_reads_no_old_kv_for_any_k(
    core: EngineCore,
) -> None:
    core.scheduler.vllm_inflight.policy = NamespacePolicy.parse("versioned:8")
    retracted_by_the_commit(core)
    assert read_by(core, "probe") == {1}


def test_engines_that_share_a_tier_have_salts_of_their_own() -> None:
    ours, theirs = NamespacePolicy(0, ".a"), NamespacePolicy(0, ".b")
    first, later = CacheNamespace(0), CacheNamespace(3)
    assert ours.salted("user", first) == theirs.salted("user", first) == "user"
    assert ours.salted("user", later) != theirs.salted("user", later)


# ------------------------------------------------------------------------ provenance
@pytest.mark.parametrize("num_commits", [1, 2])
@pytest.mark.parametrize("num_steps", range(3, 9))
def test_draft_tokens_rejected_after_a_commit_are_not_counted_in_the_kv_provenance(
    make: Callable[..., EngineCore], num_steps: int, num_commits: int
) -> None:
    """The scheduler has counted on them when it scheduled the step after the commit."""
    core = make(**KINDS["drafts, async"], inflight={"kv_versions": "on"})
    add(core, "r", prompt(1, 20), max_tokens=60)
    streams = Streams(core).step(num_steps)
    for weights in range(1, num_commits + 1):
        publish_weights(core, weights, str(weights))
        streams.step(1)
    streams.step(3)
    told = trail_of(core.scheduler.requests["r"])
    streams.run()
    read = core.model_executor.sampled["r"][-1].kv
    assert told is not None
    starts = [read.index(weights) for weights in range(num_commits + 1)]
    assert [start for start, _ in told] == starts


def test_a_request_that_fails_before_its_first_step_has_read_nothing(
    make: Callable[..., EngineCore],
) -> None:
    core = make(inflight={"kv_versions": "on"})
    for index in range(6):
        add(core, f"r{index}", prompt(index))
    add(core, "fails", prompt(9))  # has to wait: six run at a time
    core.scheduler.grammar_compile_error_reqs.update({"fails": None})
    streams = Streams(core).step(2)
    assert streams.finished == {"fails": "error"}
    assert len(streams.run().finished) == 7
    assert core.scheduler.vllm_inflight.reports.told == {}


def test_kv_provenance_is_forgotten_when_the_request_ends(
    make: Callable[..., EngineCore],
) -> None:
    core = make(inflight={"kv_versions": "on"})
    for index in range(4):
        add(core, f"r{index}", prompt(index))
    Streams(core).step(3)
    core.abort_requests(["r0"])
    assert sorted(core.scheduler.vllm_inflight.reports.told) == ["r1", "r2", "r3"]
    ask(core, "pause", mode="abort")
    assert core.scheduler.vllm_inflight.reports.told == {}
