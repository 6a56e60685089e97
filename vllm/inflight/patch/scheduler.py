"""Changes in the scheduler: the mixin, and cache salts for hashes and keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.patch.records.record import Patch


def _with_mixin(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_scheduler_cls(self: upstream.SchedulerConfig) -> type:
        from vllm.inflight.engine.scheduling.scheduler import inflight_scheduler

        return inflight_scheduler(original(self))

    return get_scheduler_cls


def _hash_once(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.inflight.engine.scheduling import encoder_cache
    from vllm.inflight.engine.scheduling.request_state import RequestState
    from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState

    def preprocess_add_request(self: upstream.EngineCore, request: Any) -> Any:
        # In the input thread, where hashing costs the engine loop no time. A commit may
        # come before the look-up, which then changes the salt.
        ours = SchedulerState.of(self.scheduler)
        policy = ours.policy
        load = ours.adapters.load_of(request.lora_request)
        root = policy.roots(ours.cache_epoch, load)[0]
        user_salt = request.cache_salt
        request.cache_salt = policy.salted(user_salt, root)
        names = encoder_cache.names_of(request.mm_features or ())
        if names:
            rename = partial(policy.salted, root=root)
            request.mm_features = encoder_cache.renamed(
                request.mm_features, names, rename
            )
        added, wave = original(self, request)
        RequestState(root, user_salt, media=names).attach(added)
        return added, wave

    return preprocess_add_request


def _keyed_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_offload_keys(self: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

        hashes = self.req.block_hashes
        for group, state in zip(
            self.config.kv_group_configs, self.group_states, strict=True
        ):
            end = group.hashes_per_chunk
            first = [
                scheduler.make_offload_key(each, group.group_idx)
                for each in hashes[end - 1 : end]
            ]
            # Hashes are chained, so in another namespace the first one differs, too.
            if state.offload_keys and state.offload_keys[:1] != first:
                state.offload_keys.clear()
                state.next_stored_chunk_idx = 0
        original(self)

    return update_offload_keys


_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"

PATCHES = [
    Patch(
        target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        expects=("self",),
        why="every scheduler stamps steps, salts requests and can retract requests",
        remove_when="upstream stamps steps at schedule time and salts by version",
        around=_with_mixin,
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.preprocess_add_request",
        expects=("self", "request"),
        why="a request is hashed with its salt at once, and not again later",
        remove_when="upstream's block hashes contain a weight version",
        around=_hash_once,
    ),
    Patch(
        target=f"{_OFFLOADING}:RequestOffloadState.update_offload_keys",
        expects=("self",),
        why="a request with a new salt needs new keys in the offloaded KV, too",
        remove_when="upstream's offloading looks KV up by the request's current hashes",
        around=_keyed_again,
    ),
]
