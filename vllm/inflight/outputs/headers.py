"""Which versions a reply was made of, whatever route it goes out by.

The door opens a record for a request that makes an engine compute; `AsyncLLM.generate`
and `AsyncLLM.encode` note in it what they yield, in the same context. A reply that is
not a stream then carries the newest version, and the epochs from first to last, in its
headers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.version_stamp import Stamp
from vllm.inflight.outputs.spans import VersionSpan

PRINTABLE = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")

record: ContextVar[ReplyVersions | None] = ContextVar("inflight_seen", default=None)
"""Of the HTTP request that is being answered."""


class ReplyVersions:
    """The versions that made one reply, so far: its tokens, or what was pooled."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], Iterable[Any]] = {}
        self._last: tuple[str, int] | None = None

    def note(self, result: Any) -> None:
        """Keep the spans of an output of the engine; later ones replace them.

        Raises:
            GenerationError: the engine has refused the request and says why, which
                upstream's routes would leave out.

        """
        for output in result.outputs:
            if output.finish_reason == "error" and output.stop_reason:
                raise upstream.GenerationError(str(output.stop_reason))
            if output.weight_versions:
                self._last = (result.request_id, output.index)
                self._outputs[self._last] = output.weight_versions

    def note_pooled(self, result: Any) -> None:
        """Keep the version of the step that has made an embedding, a score or a class.

        Nobody says so of one that was aborted.
        """
        if (stamp := getattr(result, "inflight_stamp", None)) is not None:
            made = Stamp.decode(stamp)
            span = VersionSpan(made.label, 0, 0, made.epoch)
            self._outputs[result.request_id, 0] = [span]

    @property
    def last(self) -> Iterable[Any] | None:
        """Spans of the output that was noted last; None before the first."""
        return None if self._last is None else self._outputs[self._last]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`X-Weight-Version` and `X-Weight-Epoch`; none if nothing was made.

        A label may be any string: what a header cannot hold is percent-encoded.
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
