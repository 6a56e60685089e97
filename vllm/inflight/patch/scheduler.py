"""Changes in the scheduler: the mixin, and salting where requests are hashed."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.inflight.patch.record import Patch


def _with_mixin(original: Any) -> Any:
    def get_scheduler_cls(self: Any) -> type:
        from vllm.inflight.engine.scheduler import inflight_scheduler

        return inflight_scheduler(original(self))

    return get_scheduler_cls


def _hash_once(original: Any) -> Any:
    from vllm.inflight.engine import media

    def preprocess_add_request(self: Any, request: Any) -> Any:
        # In the input thread, where hashing costs the loop nothing. A commit may
        # come between here and the look-up, which then salts again.
        scheduler = self.scheduler
        policy = scheduler.inflight_policy
        load = scheduler.inflight_adapters.load_of(request.lora_request)
        root = policy.roots(scheduler.inflight_cache_epoch, load)[0]
        user_salt = request.cache_salt
        request.cache_salt = policy.salted(user_salt, root)
        names = media.names_of(request.mm_features or ())
        if names:
            rename = partial(policy.salted, root=root)
            request.mm_features = media.renamed(request.mm_features, names, rename)
        added, wave = original(self, request)
        added.inflight_media = names
        added.inflight_user_salt = user_salt
        added.inflight_root = root
        return added, wave

    return preprocess_add_request


PATCHES = [
    Patch(
        target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        expects=("self",),
        why="every scheduler stamps its steps, salts its requests and can retract",
        remove_when="upstream stamps steps at schedule time and salts by version",
        around=_with_mixin,
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.preprocess_add_request",
        expects=("self", "request"),
        why="a request is hashed with its salt at once, not a second time later",
        remove_when="upstream has a weight version in its block hashes",
        around=_hash_once,
    ),
]
