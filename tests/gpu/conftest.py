"""The fixtures of tests/engine, for engines on GPUs."""

import os

# Engines are compared token by token. Of kernels that add up in different orders
# torch's compiler takes the fastest at each start, on a busy GPU not always the same.
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

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
