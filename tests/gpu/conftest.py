"""The fixtures of tests/engine, for engines on GPUs."""

from tests.engine.conftest import (  # noqa: F401
    booted,
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
