"""Calls of several engines are made to their end, though their callers are cancelled.

What some engines have done and others have not is taken back by the call itself. One
that ended in its middle would leave them with different weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar, cast

Call = TypeVar("Call", bound=Callable[..., Coroutine[Any, Any, Any]])

_going_on: set[asyncio.Task[Any]] = set()
"""Calls that nobody waits for; an event loop alone may forget them."""


def shielded(call: Call) -> Call:
    """Have this method of a `Control` go on when its caller is cancelled."""

    @wraps(call)
    async def to_its_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        asking = call(self, *args, **kwargs)
        if self.num_engines == 1:  # it is taken back by nobody, and may be blocking
            return await asking
        task = asyncio.create_task(asking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _going_on.add(task)
            task.add_done_callback(_ended)
            raise

    return cast(Call, to_its_end)


def _ended(task: asyncio.Task[Any]) -> None:
    _going_on.discard(task)
    if not task.cancelled():
        task.exception()  # nobody is left to be told
