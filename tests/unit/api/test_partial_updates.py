"""Versions that come in parts without a mark of their end."""

from typing import Any

import pytest

from vllm.inflight.api.compat import partial_updates
from vllm.inflight.api.compat.partial_updates import PartialUpdate
from vllm.inflight.errors import VersionConflict, WeightsMismatch


class Control:
    """Somebody else commits `other` as soon as it was asked what is served."""

    def __init__(self) -> None:
        self.served, self.before = "new", "old"

    async def compare(self, *_: Any) -> None:
        raise WeightsMismatch("lm_head.weight differs")

    async def info(self) -> dict[str, Any]:
        told = {"weight_version": self.served}
        told |= {"previous": {"weight_version": self.before}}
        self.served, self.before = "other", self.served
        return told

    async def rollback(self, to_version: str | None = None) -> Any:
        if to_version not in (None, self.before):
            raise VersionConflict(f"the target is {self.before!r}")
        self.served = self.before
        return {"weight_version": self.served}


async def test_a_version_of_somebody_else_is_not_taken_back() -> None:
    control: Any = Control()
    with pytest.raises(WeightsMismatch, match="'new' stays served: the target is"):
        await partial_updates._compare(control, "local", {}, PartialUpdate())
    assert control.served == "other"
