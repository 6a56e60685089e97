"""The fixtures of tests/e2e, for engines on GPUs."""

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import (  # noqa: F401
    booted,
    chain,
    checkpoint,
    core,
    door,
    expected,
    folders,
    fresh,
    llm,
    new,
    old,
    reference,
    shape,
    start,
    versions,
)

# Else torch's compiler has a folder for each model, and every engine that it compiles
# for compiles vLLM's own kernels again.
os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton/cache"))
# NCCL's service that reports on peers (RAS) keeps sockets of groups that have ended.
# The tests count descriptors.
os.environ.setdefault("NCCL_RAS_ENABLE", "0")


@pytest.fixture(scope="module")
def device() -> str:
    """Where the engines of tests/robustness/pauses run in this folder."""
    return "cuda"
