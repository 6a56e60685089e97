"""Restore the version from before a restart, from the engine's journal."""

from __future__ import annotations

import asyncio

from vllm.inflight import upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.from_disk import from_disk
from vllm.inflight.api.request import rate_limit
from vllm.inflight.errors import Conflict, InflightError

logger = upstream.init_logger(__name__)

POLL_S = 0.1


async def restore(control: Control) -> Reply:
    """Load the files of the version in the journal; returns the `/weight_info` reply.

    The last update is committed only if its digest is the journal's. So a folder that
    was overwritten meanwhile is rejected. If the version took several updates, the
    earlier ones are live meanwhile as `update-1` and so on.

    Raises:
        Conflict: there is no journal, its version cannot be loaded from files, or an
            update was committed since the start.
        InflightError: a file was rejected.

    """
    journal = (await control.ask("journal"))[0]
    served = await control.info()
    noted = journal["found"]
    if journal["path"] is None:
        raise Conflict("no --inflight-journal is configured")
    if noted is None:
        return served
    label = noted["weight_version"]
    if served["epoch"]:
        raise Conflict(
            f"version {served['weight_version']!r} was committed since the start; the "
            f"journal has {label!r} from before it"
        )
    if noted["model"] != journal["model"]:
        raise Conflict(
            f"the journal is of the model {noted['model']!r}, this is "
            f"{journal['model']!r}"
        )
    if noted["recipe"] is None:
        raise Conflict(f"version {label!r} did not come from files")
    if noted["recipe"]:
        rate_limit.spend_once()  # the rate limit must not stop it half-way
    for number, files in enumerate(noted["recipe"], 1):
        is_last = number == len(noted["recipe"])
        served = await from_disk(
            control,
            files["path"],
            label if is_last else None,
            base_version=served["weight_version"],
            draft_path=files["draft_path"],
            subset=files["subset"] or None,
            manifest={
                "format": 1,
                "step": noted["step"] if is_last else None,
                "name_map": files["name_map"],
            },
            expect_digest=noted["digest"] if is_last else None,
        )
    if not noted["recipe"] and label != served["weight_version"]:
        await control.rename(label, expect_version=served["weight_version"])
    return await control.info()


async def restore_at_start(control: Control) -> None:
    """Restore when a server starts; the server starts even if that fails."""
    try:
        served = await restore(control)
        logger.info("the live version at the start is %r", served["weight_version"])
    except InflightError as error:
        logger.error(
            "the version from before the restart could not be restored: %s",
            error.message,
        )
    await control.ask("journal", tried=True)


async def tried(control: Control) -> None:
    """Wait until the first of several API servers has tried to restore."""
    while not (await control.ask("journal"))[0]["tried"]:
        await asyncio.sleep(POLL_S)
