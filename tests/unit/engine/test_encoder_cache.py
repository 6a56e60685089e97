"""Encoder outputs: a request reads none that older weights made."""

from types import SimpleNamespace

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
)
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.pool.late_interaction import build_late_interaction_doc_params
from vllm.v1.request import Request

from vllm.inflight.engine.scheduling import encoder_cache
from vllm.inflight.engine.scheduling.prefix_cache import NamespacePolicy
from vllm.inflight.engine.scheduling.request_state import CacheNamespace
from vllm.inflight.engine.scheduling.scheduler import ServingState
from vllm.inflight.engine.scheduling.step_state import StepState
from vllm.inflight.errors import PauseConflict
from vllm.inflight.patch.scheduler import _hash_once

SIZE, NUM_EMBEDS = 16, 4


@pytest.fixture
def manager() -> EncoderCacheManager:
    return EncoderCacheManager(SIZE)


def asking(*names: str) -> Request:
    items = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=name,
            mm_position=PlaceholderRange(offset=n * NUM_EMBEDS, length=NUM_EMBEDS),
            mm_hash=name,
        )
        for n, name in enumerate(names)
    ]
    tokens = [0] * (NUM_EMBEDS * len(items) + 1)
    sampling = SamplingParams(max_tokens=1)
    return Request("-".join(names), tokens, sampling, None, mm_features=items)


def names(request: Request) -> list[str]:
    return [item.identifier for item in request.mm_features]


def encode(manager: EncoderCacheManager, request: Request) -> bool:
    """Have its one item encoded, unless it is there; returns whether it is."""
    if manager.check_and_update_cache(request, 0):
        return True
    assert manager.can_allocate(request, 0, SIZE, 0)
    manager.allocate(request, 0)
    return False


def test_encoder_output_names_differ_by_namespace_and_are_upstreams_in_the_first():
    policy, request = NamespacePolicy(), asking("cat", "dog")
    policy.plant(request, CacheNamespace(0))
    assert names(request) == ["cat", "dog"]
    policy.plant(request, CacheNamespace(1))
    of_first = names(request)
    policy.plant(request, CacheNamespace(2))
    assert set(of_first).isdisjoint(names(request))
    policy.plant(request, CacheNamespace(0))
    assert names(request) == ["cat", "dog"]
    assert [item.mm_hash for item in request.mm_features] == ["cat", "dog"]


def test_the_samples_of_one_prompt_do_not_rename_each_others_items():
    first, second = asking("cat"), asking("cat")
    second.mm_features = first.mm_features
    NamespacePolicy().plant(first, CacheNamespace(1))
    assert names(second) == ["cat"] != names(first)


def test_a_resumed_requests_new_encoder_output_names_reach_its_worker():
    request, plain = asking("cat", "dog"), asking()
    NamespacePolicy().plant(request, CacheNamespace(1))
    known = SimpleNamespace(mm_features=request.mm_features)
    request.num_preemptions = 1
    NamespacePolicy().plant(request, CacheNamespace(2))
    assert set(names(request)).isdisjoint(names(known))
    resumed = SimpleNamespace(resumed_req_ids={"cat-dog", "text"})
    output = SimpleNamespace(scheduled_cached_reqs=resumed)
    encoder_cache.tell({"cat-dog": request, "text": plain}, output)
    encoder_cache.learn({"cat-dog": known}, output)
    assert names(known) == names(request)
    assert [item.mm_hash for item in known.mm_features] == ["cat", "dog"]


def test_a_step_without_resumed_requests_sends_no_encoder_output_names():
    output = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set())
    )
    encoder_cache.tell({}, output)
    encoder_cache.learn({}, output)
    assert StepState.of(output).media == {}


def test_an_output_that_an_older_request_reads_is_not_shared_with_a_newer_one(manager):
    older, newer = asking("cat"), asking("cat")
    assert not encode(manager, older)
    NamespacePolicy().plant(newer, CacheNamespace(1))
    assert encoder_cache.drop_idle(manager) == 0
    assert not encode(manager, newer)
    assert encode(manager, older)


def test_an_output_that_no_request_reads_is_dropped_and_its_slots_are_free(manager):
    requests = [asking(str(n)) for n in range(SIZE // NUM_EMBEDS)]
    for request in requests:
        assert not encode(manager, request)
    for request in requests[1:]:
        manager.free(request)
    assert encoder_cache.drop_idle(manager) == 3
    assert sorted(manager.get_freed_mm_hashes()) == ["1", "2", "3"]
    assert encode(manager, requests[0])
    for name in "abc":
        assert not encode(manager, asking(name))
    assert manager.num_free_slots == 0


def test_a_cache_that_keeps_nothing_has_nothing_to_drop():
    assert encoder_cache.drop_idle(EncoderDecoderCacheManager(SIZE)) == 0


def test_a_request_is_hashed_with_the_encoder_output_names_of_its_namespace():
    item = asking("cat").mm_features[0]
    adapters = SimpleNamespace(load_of=lambda _: 0)
    state, scheduler = ServingState.__new__(ServingState), SimpleNamespace()
    state.policy, state.adapters, state.cache_epoch = NamespacePolicy(), adapters, 1
    state.attach(scheduler)
    hashed = []

    def original(_, sent: EngineCoreRequest) -> tuple[Request, int]:
        hashed.extend(sent.mm_features)
        return Request.from_engine_core_request(sent, None), 0

    sent = EngineCoreRequest(
        request_id="1",
        prompt_token_ids=[0] * 5,
        mm_features=[item],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    added, _ = _hash_once(original)(SimpleNamespace(scheduler=scheduler), sent)
    fresh = asking("cat")
    NamespacePolicy().plant(fresh, CacheNamespace(1))
    assert names(added) == names(fresh) == [one.identifier for one in hashed]
    assert (item.identifier, hashed[0].mm_hash) == ("cat", "cat")
    NamespacePolicy().plant(added, CacheNamespace(2))
    NamespacePolicy().plant(fresh, CacheNamespace(2))
    assert names(added) == names(fresh) != [one.identifier for one in hashed]


def test_requests_that_need_a_dropped_encoder_output_are_named(
    manager: EncoderCacheManager,
) -> None:
    looks, scores, plain = asking("a"), asking("b"), asking("c")
    looks.streaming_queue, looks.num_computed_tokens = [], 1
    scores.pooling_params = PoolingParams(
        late_interaction_params=build_late_interaction_doc_params("query")
    )
    known = {r.request_id: r for r in (looks, plain)}
    scheduler = SimpleNamespace(requests=known, encoder_cache_manager=manager)
    encoder_cache.check_retractable(scheduler)
    manager.allocate(looks, 0)
    with pytest.raises(PauseConflict, match=r"'a'.*streaming session"):
        encoder_cache.check_retractable(scheduler)
    manager.free(looks)
    known["b"] = scores
    with pytest.raises(PauseConflict, match=r"'b'.*late interaction"):
        encoder_cache.check_retractable(scheduler)
