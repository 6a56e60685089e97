"""Silence for two warnings of upstream's loader while an update is staged.

Upstream warns of each float32 tensor that it loads into a bfloat16 parameter, and of
each layer that no tensor was loaded into. Trainers send float32 on purpose, and a head
that is tied to its embedding gets no tensor of its own. The update loader checks both
cases itself and rejects the update if something is wrong. Other threads, such as a
reload by upstream's own route, still warn.
"""

from __future__ import annotations

import logging

from vllm.inflight import upstream

STAGING_THREAD = "inflight-stage"
EXPECTED = ("Attempted to load weight %s with dtype", "%s: Failed to load weights")
"""How the formats of the two messages begin."""


class _NotOfStaging(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        is_of_staging = record.threadName == STAGING_THREAD
        return not (is_of_staging and str(record.msg).startswith(EXPECTED))


_filter = _NotOfStaging()


def silence_expected_warnings() -> None:
    """Drop the two warnings where the staging thread logs them; once per process."""
    for name in (
        upstream.StageMissingLayer.__module__,
        upstream.get_layerwise_info.__module__,
    ):
        # `addFilter` adds the same filter once.
        logging.getLogger(name).addFilter(_filter)
