"""The versioned prefix cache: KV of other weights is never read by a new request.

vLLM's block hashes are chained, and a request's `cache_salt` enters the hash of
block 0, so one salt separates the whole chain. Ours is the cache epoch, which
grows whenever the bytes of the weights change and is never reused: a label may
come back, its KV may not. Epoch 0 has no salt of ours, so that hashes equal
upstream's until the first commit.

The rule: whenever a request looks for KV, it carries the salt of the current
epoch. Those that run on across a commit keep their old root, and so the blocks they
fill with KV of both versions stay out of reach of new requests.
"""

from __future__ import annotations

from typing import Any

SEPARATOR = "\x1f"


def salted(user_salt: str | None, epoch: int) -> str | None:
    """The salt of a request that was given `user_salt`, in `epoch`.

    The epoch comes first and has no separator in it, so no salt of a user can
    be mistaken for another user's in another epoch.
    """
    if epoch == 0:
        return user_salt
    return f"w{epoch}{SEPARATOR}{user_salt or ''}"


def resalt(request: Any, epoch: int) -> bool:
    """Give `request` the salt of `epoch`, hashes included; False if it has it."""
    known = vars(request)
    known.setdefault("inflight_user_salt", request.cache_salt)
    if known.get("inflight_cache_epoch", 0) == epoch:
        return False
    request.inflight_cache_epoch = epoch
    request.cache_salt = salted(request.inflight_user_salt, epoch)
    request.block_hashes.clear()
    request.update_block_hashes()
    return True
