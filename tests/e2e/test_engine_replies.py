"""The replies that stand for an engine in route tests are those of an engine."""

from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engine_replies import UNRECORDED, record, recorded, shape
from vllm.inflight.calls import CALLS

pytestmark = pytest.mark.engine


def test_a_core_replies_with_the_keys_that_are_recorded(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    found = record(core, folders["new"])
    known = recorded()
    assert found.keys() == known.keys() - UNRECORDED.keys()
    for key, reply in found.items():
        assert shape(reply) == shape(known[key]), key


def test_every_call_has_a_recorded_reply() -> None:
    assert CALLS.keys() <= recorded().keys()
