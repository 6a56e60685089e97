"""Serving again what was served before a restart, by what the engine's journal says."""

from __future__ import annotations

import asyncio

from vllm.inflight import upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.from_disk import from_disk
from vllm.inflight.api.request import rate_limit
from vllm.inflight.calls import ReadJournal
from vllm.inflight.errors import Conflict, InflightError

logger = upstream.init_logger(__name__)

POLL_S = 0.1


async def restore(control: Control) -> Reply:
    """Read the files again that led to what was served; the reply of `/weight_info`.

    The last of them is committed only if it makes the digest that the version had, so a
    folder that was written over meanwhile does not pass for what it held. If it took
    several updates, those before it are served until then, as `update-1` and so on.

    Raises:
        Conflict: there is no journal, what it says cannot be had from files, or an
            update was committed since the start.
        InflightError: a file of it was refused.

    """
    journal = (await control.ask(ReadJournal()))[0]
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
        rate_limit.spend_once()  # held up half-way it could not be had again
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
    """`restore`, for a server that is about to answer; it answers in any case."""
    try:
        served = await restore(control)
        logger.info("weights %r are served after the start", served["weight_version"])
    except InflightError as error:
        logger.error(
            "what was served before the start cannot be served again: %s", error.message
        )
    await control.ask(ReadJournal(tried=True))


async def tried(control: Control) -> None:
    """Until the first server has done `restore_at_start`; for those beside it."""
    while not (await control.ask(ReadJournal()))[0]["tried"]:
        await asyncio.sleep(POLL_S)
