"""Products in float32 that a GPU does not round, to be compared with those of a CPU."""

import os
from collections.abc import Iterator

import pytest

EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""In the environment of an engine that serves float32.

Triton would round the factors of attention to TF32, which moves log-probabilities by as
much as some bounds of tests allow. It reads this variable when it compiles a kernel. A
process keeps the kernels that it has compiled, so set it before the first engine.
"""


@pytest.fixture(scope="module")
def exact_products() -> Iterator[None]:
    """Engines that start from here on in this module compute with `EXACT`."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in EXACT.items():
            environment.setenv(name, value)
        yield


def be_exact() -> None:
    """Have engines of this process compute with `EXACT`."""
    os.environ.update(EXACT)
