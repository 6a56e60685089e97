"""An adopted method on a quantised engine reads nothing of the version before.

A layer has its content when it is processed, which may be long after its weights have
come: kernels also need its scales.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_adopted_direct_writes import (  # noqa: F401 (a fixture)
    EXTENSION,
    build,
    write,
)
from tests.e2e.test_adoption import served, tensors_of
from tests.e2e.test_sleep import says
from tests.support.frameworks.core import extended_core
from tests.support.frameworks.direct import ATTENTION_OUT, TENSORS
from vllm.inflight.errors import InflightError

pytestmark = pytest.mark.engine


def test_a_layer_is_not_read_before_it_is_processed(
    build: None,  # noqa: F811
    checkpoint: Callable[..., Path],
) -> None:
    old, new = (
        checkpoint(seed, "fp8-channel", family="qwen2", hidden=256) for seed in (0, 1)
    )
    TENSORS["checkpoint"], TENSORS["kernel"] = tensors_of(new), {}
    with extended_core(old, EXTENSION) as core:
        before, said = served(core), says(core, "before")
        with pytest.raises(InflightError, match=f"reads {ATTENTION_OUT}"):
            write(core, "reads before scales")
        assert (served(core), says(core, "after")) == (before, said)
    TENSORS.clear()
