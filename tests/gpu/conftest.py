"""The fixtures of tests/engine, for engines on GPUs."""

from tests.engine.conftest import (  # noqa: F401
    checkpoint,
    fresh,
    llm,
    new,
    old,
    reference,
    shape,
    start,
    versions,
)
