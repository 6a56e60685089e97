"""Engines of two tensor-parallel ranks, for tests that were written for one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "worker_extension_cls": "tests.support.engines.transport.Extension",
}
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
"""Of an engine whose two ranks are pipeline stages instead."""


@pytest.fixture(scope="module")
def start(start: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`start(folder, **options)`, in place of the one of all tests."""

    def llm(folder: Path, **options: Any) -> Any:
        return start(folder, **(RANKS | options))

    with pytest.MonkeyPatch.context() as environment:
        # A process that has computed on a CPU's threads is not to be forked.
        environment.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        yield llm
