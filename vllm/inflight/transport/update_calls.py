"""The calls by which a trainer engine has one update made.

Upstream's interface has three: start, update and finish. A client whose
`update_weights` has the parameters `start` and `finish` opens the update with the first
chunk and commits it with the last one. Then no call waits for the one before.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vllm.inflight.errors import EngineUnreachable, InflightError


class UpdateCalls:
    """The calls of one update to a client.

    Args:
        client: the inference side.
        manifest: of the update; None without one.

    """

    def __init__(self, client: Any, manifest: dict[str, Any] | None = None) -> None:
        self._client = client
        self._opening = {} if manifest is None else {"manifest": manifest}
        known = inspect.signature(client.update_weights).parameters
        self._joins = "start" in known and "finish" in known
        """Whether `update_weights` of the client opens and commits updates."""
        self._is_open = self._is_committed = False

    def open(self) -> None:
        """Open the update, unless the first chunk does."""
        if not self._joins:
            self._start()

    def update(self, update_info: dict[str, Any], *, is_last: bool) -> None:
        """Have a chunk received; `is_last` says that none follows."""
        if not self._joins:
            self._client.update_weights(update_info)
            return
        options: dict[str, Any] = {"finish": {}} if is_last else {}
        if not self._is_open:
            options["start"] = self._opening
        # Before the answer, because a transfer that breaks off does not wait for it.
        self._is_open = True
        try:
            self._client.update_weights(update_info, **options)
        except BaseException:
            # The engine itself aborts an update that it opened in a failed call.
            self._is_open = "start" not in options
            raise
        self._is_committed = is_last

    @property
    def served(self) -> str | None:
        """The digest of what is served after the commit, if the client knows it."""
        reply = getattr(self._client, "committed", None) or {}
        digest: str | None = reply.get("digest")
        return digest

    def commit(self) -> None:
        """Commit the update, unless the last chunk did."""
        if self._is_committed:
            return
        if not self._is_open:  # there was no chunk
            self._start()
        self._client.finish_weight_update()

    def abort(self) -> None:
        """Abort the update, if it may be open.

        A client with only upstream's four calls cannot abort. It leaves the update to
        its deadline.
        """
        if self._is_open:
            with suppress(InflightError):  # the error before it says more
                getattr(self._client, "abort_weight_update", lambda: None)()

    def _start(self) -> None:
        self._client.start_weight_update(**self._opening)
        self._is_open = True


@contextmanager
def update_of(
    client: Any, manifest: dict[str, Any] | None = None
) -> Iterator[UpdateCalls]:
    """An update around a transfer of tensors: committed, or aborted on an error."""
    calls = UpdateCalls(client, manifest)
    calls.open()
    try:
        yield calls
        calls.commit()
    except EngineUnreachable:
        raise  # an abort would wait for the engine as long again
    except BaseException:
        calls.abort()
        raise
