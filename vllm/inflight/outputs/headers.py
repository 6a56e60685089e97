"""The headers that name the versions of a reply, on every route that computes.

The server opens a record for each such request. `AsyncLLM.generate` and
`AsyncLLM.encode` note their outputs in it, in the same context. The headers of a reply
that is not a stream then have the newest version, and the epochs from first to last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.version_stamp import Stamp
from vllm.inflight.outputs.reply_state import PooledVersion
from vllm.inflight.outputs.spans import VersionSpan

PRINTABLE = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")

record: ContextVar[ReplyVersions | None] = ContextVar("inflight_seen", default=None)
"""The record of the current HTTP request."""


class ReplyVersions:
    """The versions of one reply so far: of its tokens, or of a pooled result."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], Iterable[Any]] = {}
        self._last: tuple[str, int] | None = None

    def note(self, result: upstream.RequestOutput) -> None:
        """Keep the spans of an output; later outputs of the choice replace them.

        Raises:
            GenerationError: the engine has rejected the request. Upstream's routes
            would
                leave the reason out.

        """
        for output in result.outputs:
            if output.finish_reason == "error" and output.stop_reason:
                raise upstream.GenerationError(str(output.stop_reason))
            if output.weight_versions:
                self._last = (result.request_id, output.index)
                self._outputs[self._last] = output.weight_versions

    def note_pooled(self, result: upstream.PoolingRequestOutput) -> None:
        """Keep the version of the step that made an embedding, a score or a class.

        An aborted request has none.
        """
        pooled = PooledVersion.find(result)
        if pooled is not None and pooled.stamp is not None:
            made = Stamp.decode(pooled.stamp)
            span = VersionSpan(made.label, 0, 0, made.epoch)
            self._outputs[result.request_id, 0] = [span]

    @property
    def last(self) -> Iterable[Any] | None:
        """The spans of the last noted output; None before the first."""
        return None if self._last is None else self._outputs[self._last]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`X-Weight-Version` and `X-Weight-Epoch`; empty without outputs.

        Characters of a label that a header cannot hold are percent-encoded.
        """
        spans = [span for spans in self._outputs.values() for span in spans]
        if not spans:
            return []
        newest = max(spans, key=lambda span: span.epoch)
        oldest = min(span.epoch for span in spans)
        epochs = {str(oldest): None, str(newest.epoch): None}
        return [
            (b"x-weight-version", quote(newest.version, safe=PRINTABLE).encode()),
            (b"x-weight-epoch", "-".join(epochs).encode()),
        ]
