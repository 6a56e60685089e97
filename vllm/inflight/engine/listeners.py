"""Requests that want to know whose KV they read, and what each knows by now."""

from __future__ import annotations

from typing import Any

from vllm.inflight.engine import provenance
from vllm.inflight.engine.stamp import KV_FIELD, KV_OPTION


class Listeners:
    """Those of one scheduler.

    Args:
        hear_all: whether every request is one.

    """

    def __init__(self, *, hear_all: bool) -> None:
        self._hear_all = hear_all
        self.told: dict[str, tuple[Any, provenance.Trail]] = {}
        """By id."""

    def add(self, request: Any, known: Any) -> None:
        """Note whether `request` asks; `known` is what it becomes a part of, or None.

        The next chunk of a session becomes a part of the request there is.
        """
        options = request.sampling_params and request.sampling_params.extra_args
        if self._hear_all or (options and options.get(KV_OPTION)):
            self.told.setdefault(request.request_id, (known or request, []))

    def tell(self, outputs: Any) -> None:
        """Send along the trails that have changed; the front end keeps the last."""
        for output in outputs:
            if (told := self.told.get(output.request_id)) is None:
                continue
            request, known = told
            # One that ends before it was ever scheduled has none.
            trail = list(provenance.trail_of(request) or known)
            if trail != known:
                self.told[output.request_id] = (request, trail)
                params = output.kv_transfer_params or {}
                output.kv_transfer_params = params | {KV_FIELD: trail}
            # So does every chunk of a session, which goes on.
            if output.finish_reason is not None and request.is_finished():
                del self.told[output.request_id]

    def forget(self, request: Any) -> None:
        """Tell it nothing more; it has been aborted."""
        self.told.pop(request.request_id, None)
