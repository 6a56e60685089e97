"""The versioned prefix cache: how old the KV may be that a request begins with.

vLLM's block hashes are chained, and a request's `cache_salt` enters the hash of block
0, so one salt separates the whole chain. Ours names the *root*: the cache epoch in
which the chain was begun, and how often the request's adapter, if it has one, had been
loaded by then. That epoch grows whenever the bytes of the weights change and is never
reused: a label may come back, its KV may not. Epoch 0 has no salt of ours, so that
hashes equal upstream's until the first commit.

A request that runs on across a commit keeps its root, and so the blocks it fills with
KV of both versions hang under the old one. Every block under a root was computed in
that epoch or later, which makes the root a bound on its age:

    versioned     look under the current epoch only
    versioned:K   look under the last K + 1 epochs, and take the longest hit
    versioned:auto  look under one epoch only, the last one since which the weights
                  may have moved too far
    shared        look under epoch 0 only, as upstream does

KV of an earlier load of the adapter is looked for by `shared` only.
A request that was retracted is to be computed again under the weights then live, so it
looks under the current epoch only, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling import encoder_cache
from vllm.inflight.engine.scheduling.request_state import (
    CacheNamespace,
    RequestState,
)

SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class NamespacePolicy:
    """Of one engine: `--inflight-prefix-cache`, and whether its KV leaves it."""

    oldest: int | None = 0
    """How many epochs old KV may be; None for `shared`."""
    nonce: str = ""
    """Tells this engine's epochs from those of others with which it shares a tier."""
    drift: float = -1.0
    """How far the weights may move under one root, all updates added up."""

    @classmethod
    def parse(cls, text: str, nonce: str = "", drift: float = -1.0) -> NamespacePolicy:
        """The policy called `text`, a valid value of the knob."""
        if text == "shared":
            return cls(None, nonce)
        if text == "versioned:auto":
            return cls(0, nonce, drift)
        return cls(int(text.partition(":")[2] or 0), nonce)

    def roots(
        self, epoch: int, load: int = 0, *, is_retracted: bool = False
    ) -> Sequence[CacheNamespace]:
        """Where a request looks for KV in `epoch`, the newest first.

        Args:
            epoch: of the cache.
            load: of the request's adapter.
            is_retracted: whether it is to be computed again.

        """
        if self.oldest is None and not is_retracted:
            return (CacheNamespace(0),)
        oldest = epoch if is_retracted else max(0, epoch - (self.oldest or 0))
        return [CacheNamespace(each, load) for each in range(epoch, oldest - 1, -1)]

    @overload
    def salted(self, user_salt: str, root: CacheNamespace) -> str: ...
    @overload
    def salted(self, user_salt: str | None, root: CacheNamespace) -> str | None: ...
    def salted(self, user_salt: str | None, root: CacheNamespace) -> str | None:
        """The salt under `root` of a request that was given `user_salt`.

        The root comes first and has no separator in it, so no salt of a user can
        be mistaken for another user's under another root.
        """
        if root == CacheNamespace(0) and SEPARATOR not in (user_salt or ""):
            return user_salt
        loaded = f"a{root.load}" if root.load else ""
        return f"w{root.epoch}{loaded}{self.nonce}{SEPARATOR}{user_salt or ''}"

    def plant(self, request: upstream.Request, root: CacheNamespace) -> None:
        """Give `request` its hashes under `root`; those of other roots are kept."""
        state = RequestState.of(request)
        if state.root is None:
            state.root, state.user_salt = CacheNamespace(0), request.cache_salt
        if state.root == root:
            return
        state.hashes[state.root] = request.block_hashes
        state.root = root
        # Names of media are in the hashes too.
        encoder_cache.plant(request, partial(self.salted, root=root))
        request.cache_salt = self.salted(state.user_salt, root)
        request.block_hashes = state.hashes.pop(root, None) or []
        request.update_block_hashes()  # for what was sampled since, or for all


def forget(request: upstream.Request, roots: Sequence[CacheNamespace]) -> None:
    """Drop the hashes of `request` under other roots than these."""
    state = RequestState.of(request)
    if state.hashes:
        state.hashes = {r: h for r, h in state.hashes.items() if r in roots}
