"""An update that has received a version, and stands before anybody hears of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call
from vllm.inflight.transport.files.receiver_engine import LocalEngine


@contextmanager
def standing(core: EngineCore, folder: Path) -> Iterator[None]:
    """Context: such an update of `folder`; after it, the update goes on."""
    receive = LocalEngine.receive_weights
    received, goes_on = threading.Event(), threading.Event()

    def receive_and_stand(self: LocalEngine, info: Any) -> None:
        receive(self, info)
        received.set()
        assert goes_on.wait(30)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalEngine, "receive_weights", receive_and_stand)
        call(core, "start", transport="local")
        core.inflight("receive", {"update_info": {"path": str(folder)}})
        assert received.wait(30)
        try:
            yield
        finally:
            goes_on.set()
