"""An update in one call; from files, which the host of every engine has to have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.calls import StartUpdate
from vllm.inflight.errors import InflightError, Malformed


async def from_disk(
    control: Control,
    path: str | None,
    weight_version: str | None = None,
    *,
    mode: str | None = None,
    flush_cache: bool = False,
    subset: object = None,
    draft_path: str | None = None,
    expect_digest: str | None = None,
    keep_pause: bool = False,
    **options: Any,
) -> Reply:
    """Start, receive, prepare and commit an update from files.

    See `update_weights_from_disk` for arguments and errors. With `keep_pause`, the
    engine is paused in place when all tensors are received. It stays paused after a
    commit.
    """
    given: list[dict[str, Any]] = [] if path is None else [{"path": path}]
    if draft_path is not None:
        given.append({"path": draft_path, "draft": True})
    paths = [info["path"] for info in given]
    if not given or not all(isinstance(p, str) and p for p in paths):
        raise Malformed(
            "the call needs path, the path of a safetensors checkpoint, or draft_path, "
            "the path of a drafter's checkpoint, or both"
        )
    stated = {"subset": subset, "draft": True if path is None else None}
    if added := {name: value for name, value in stated.items() if value is not None}:
        manifest = options.get("manifest")
        manifest = {"format": 1} if manifest is None else manifest
        if isinstance(manifest, dict):  # otherwise `start` rejects it
            options["manifest"] = manifest | added
    start = StartUpdate(
        source=path,
        draft_source=draft_path,
        transport="local",
        weight_version=weight_version,
        **options,
    )
    finish: dict[str, Any] = {"mode": mode, "flush_cache": flush_cache}
    finish["expect_digest"] = expect_digest
    if not keep_pause:
        return await control.update_in_one_call(given, start=start, finish=finish)
    async with control.in_one_call(start) as started:
        update_id = started["update_id"]
        if started["phase"] == "staging":
            for chunk, info in enumerate(given):
                await control.update(info, update_id, chunk=chunk)
        async with _paused(control):
            return await control.finish(update_id=update_id, **finish)


@asynccontextmanager
async def _paused(control: Control) -> AsyncIterator[None]:
    """Pause in place; the pause stays unless the block fails."""
    is_new = not (await control.paused())["is_paused"]
    try:
        if is_new:
            await control.pause("in_place")
        yield
    except BaseException:
        if is_new:
            with suppress(InflightError):  # the first error is raised
                state = await control.paused()
                # Otherwise another call has made the pause stricter, or owns it.
                if (state["mode"], state["owner"]) == ("in_place", None):
                    await control.resume()
        raise
