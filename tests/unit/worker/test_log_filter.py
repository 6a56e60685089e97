"""Warnings of upstream's that every update causes are silent while one is staged."""

import logging
import threading

import pytest
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models import utils

from vllm.inflight.worker.staging.log_filter import (
    STAGING_THREAD,
    silence_expected_warnings,
)


def warn() -> None:
    layerwise.logger.warning("%s: Failed to load weights", "ParallelLMHead")
    utils.logger.warning(
        "Attempted to load weight %s with dtype %s into parameter with dtype %s",
        *("w", "float32", "bfloat16"),
    )
    utils.logger.warning("something else")


@pytest.mark.parametrize("name, count", [(STAGING_THREAD, 1), ("another", 3)])
def test_expected_warnings_are_silenced_on_the_staging_thread_only(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    silence_expected_warnings()
    silence_expected_warnings()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    for logger in (layerwise.logger, utils.logger):
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "level", logging.WARNING)
        logging.getLogger("vllm").manager._clear_cache()  # type: ignore[attr-defined]
    thread = threading.Thread(target=warn, name=name)
    thread.start()
    thread.join()
    assert len(records) == count


def test_the_silenced_warnings_exist_upstream() -> None:
    for module, text in (
        (layerwise, "%s: Failed to load weights"),
        (utils, "Attempted to load weight %s with dtype %s into "),
    ):
        with open(module.__file__) as source:
            assert text in source.read()
