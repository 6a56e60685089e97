"""The versioned prefix cache: the namespaces in which a request finds cached KV.

vLLM chains its block hashes, and a request's `cache_salt` enters the hash of block 0.
So one salt separates a whole chain. Here the salt names the *prefix-cache namespace*.
It consists of the cache epoch in which the chain began, and of the number of times that
the request's adapter had been loaded by then.

The cache epoch grows when the bytes of the weights change, and is never reused. Epoch 0
adds no salt, so hashes equal upstream's until the first commit.

A request that runs across a commit keeps its namespace. So the blocks that it fills
with KV of both versions stay in the old namespace. Every block of a namespace was
computed in its epoch or later. A request looks for KV in these namespaces:

| policy | namespaces |
|---|---|
| `versioned` | the current epoch |
| `versioned:K` | the last K + 1 epochs; the longest hit is used |
| `versioned:auto` | one epoch, which ends when the weights may have drifted too far |
| `shared` | epoch 0, as upstream does |

Only `shared` finds KV of an earlier load of the adapter. A retracted request looks in
the current epoch only, whatever the policy, because it is computed again.
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
    """The value of `--inflight-prefix-cache`, for one engine."""

    oldest: int | None = 0
    """Largest age of KV in epochs; None for `shared`."""
    nonce: str = ""
    """Separates this engine's epochs from those of engines that share a KV store."""
    drift: float = -1.0
    """The largest sum of drifts of all updates in one namespace."""

    @classmethod
    def parse(cls, text: str, nonce: str = "", drift: float = -1.0) -> NamespacePolicy:
        """The policy for a valid value of `--inflight-prefix-cache`."""
        if text == "shared":
            return cls(None, nonce)
        if text == "versioned:auto":
            return cls(0, nonce, drift)
        return cls(int(text.partition(":")[2] or 0), nonce)

    def roots(
        self, epoch: int, load: int = 0, *, is_retracted: bool = False
    ) -> Sequence[CacheNamespace]:
        """The namespaces where a request looks for KV in `epoch`, the newest first.

        Args:
            epoch: the cache epoch.
            load: the number of earlier loads of the request's adapter.
            is_retracted: whether the request was retracted.

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
        """The salt of a request in namespace `root`, with the user's own salt.

        The namespace comes first and contains no separator. So the salts of two users
        in different namespaces cannot be equal.
        """
        if root == CacheNamespace(0) and SEPARATOR not in (user_salt or ""):
            return user_salt
        loaded = f"a{root.load}" if root.load else ""
        return f"w{root.epoch}{loaded}{self.nonce}{SEPARATOR}{user_salt or ''}"

    def plant(self, request: upstream.Request, root: CacheNamespace) -> None:
        """Give `request` its hashes in namespace `root`, and keep its other hashes."""
        state = RequestState.of(request)
        if state.root is None:
            state.root, state.user_salt = CacheNamespace(0), request.cache_salt
        if state.root == root:
            return
        state.hashes[state.root] = request.block_hashes
        state.root = root
        # The hashes contain the names of media, too.
        encoder_cache.plant(request, partial(self.salted, root=root))
        request.cache_salt = self.salted(state.user_salt, root)
        request.block_hashes = state.hashes.pop(root, None) or []
        request.update_block_hashes()  # of the tokens sampled since, or of all tokens


def forget(request: upstream.Request, roots: Sequence[CacheNamespace]) -> None:
    """Drop the hashes of `request` in all other namespaces."""
    state = RequestState.of(request)
    if state.hashes:
        state.hashes = {r: h for r, h in state.hashes.items() if r in roots}
