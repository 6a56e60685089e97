"""The stream that steps, as who changes the weights between two of them sees it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.second_set import Sets, version
from vllm.inflight.stage.arena import Arena
from vllm.inflight.stage.steps import Steps


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """What stands in for a GPU's streams: `current.stream`, of each thread its own."""
    current = threading.local()

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        before = getattr(current, "stream", None)
        current.stream = chosen or before
        yield
        current.stream = before

    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: getattr(current, "stream", None)
    )
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return current


def test_weights_are_exchanged_on_the_stream_that_steps_in_another_thread(
    current: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(torch.device("cuda"))

    def step() -> None:
        with steps.running():
            current.stream = "of the thread that steps"  # chosen in the first step

    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = Sets(arena)
        sets.stager.steps = steps
        sets.stage(version(1).items())
        seen: list[Any] = []
        whole = sets.stager._flip
        monkeypatch.setattr(
            sets.stager,
            "_flip",
            lambda: (seen.append(getattr(current, "stream", None)), whole())[1],
        )
        sets.stager.flip()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        sets.stager.flip()
    assert seen == [None, "of the thread that steps"]
