"""The versioned prefix cache: how old the KV may be that a request begins with.

vLLM's block hashes are chained, and a request's `cache_salt` enters the hash of block
0, so one salt separates the whole chain. Ours names the *root*: the cache epoch in
which the chain was begun. That epoch grows whenever the bytes of the weights change
and is never reused: a label may come back, its KV may not. Root 0 has no salt of ours,
so that hashes equal upstream's until the first commit.

A request that runs on across a commit keeps its root, and so the blocks it fills with
KV of both versions hang under the old one. Every block under a root was computed in
that epoch or later, which makes the root a bound on its age:

    versioned     look under the current root only
    versioned:K   look under the last K + 1 roots, and take the longest hit
    versioned:auto  look under the current root only, but an update by which the weights
                  have hardly moved begins no new one
    shared        look under root 0 only, as upstream does

A request that was retracted is to be computed again under the weights then live, so it
looks under the current root whatever the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class Policy:
    """Of one engine: `--inflight-prefix-cache`, and whether its KV leaves it."""

    oldest: int | None = 0
    """How many epochs old KV may be; None for `shared`."""
    nonce: str = ""
    """Tells this engine's epochs from those of others with which it shares a tier."""
    drift: float = -1.0
    """How far the weights may move under one root, all updates added up."""

    @classmethod
    def parse(cls, text: str, nonce: str = "", drift: float = -1.0) -> Policy:
        """The policy called `text`, a valid value of the knob."""
        if text == "shared":
            return cls(None, nonce)
        if text == "versioned:auto":
            return cls(0, nonce, drift)
        return cls(int(text.partition(":")[2] or 0), nonce)

    def roots(self, epoch: int, *, is_retracted: bool = False) -> Sequence[int]:
        """Where a request looks for KV in `epoch`, the newest first."""
        if is_retracted:
            return (epoch,)
        if self.oldest is None:
            return (0,)
        return range(epoch, max(0, epoch - self.oldest) - 1, -1)

    def salted(self, user_salt: str | None, root: int) -> str | None:
        """The salt under `root` of a request that was given `user_salt`.

        The epoch comes first and has no separator in it, so no salt of a user can
        be mistaken for another user's under another root.
        """
        if root == 0:
            return user_salt
        return f"w{root}{self.nonce}{SEPARATOR}{user_salt or ''}"

    def plant(self, request: Any, root: int) -> None:
        """Give `request` its hashes under `root`; those of other roots are kept."""
        known = vars(request)
        user_salt = known.setdefault("inflight_user_salt", request.cache_salt)
        if known.get("inflight_root", 0) == root:
            return
        grown = known.setdefault("inflight_hashes", {})
        grown[known.get("inflight_root", 0)] = request.block_hashes
        request.inflight_root = root
        request.cache_salt = self.salted(user_salt, root)
        request.block_hashes = grown.pop(root, None) or []
        request.update_block_hashes()  # for what was sampled since, or for all


def forget(request: Any, roots: Sequence[int]) -> None:
    """Drop the hashes of `request` under other roots than these."""
    grown = vars(request).get("inflight_hashes")
    if grown:
        request.inflight_hashes = {r: h for r, h in grown.items() if r in roots}
