"""What comes between the end mark of an adopted version and its commit, and after a
version that has failed."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import answers, call, publish
from tests.support.frameworks.core import extended_core
from tests.support.frameworks.ends import CALLED, DEVICES, FAULTS, SOURCE
from vllm.inflight.errors import (
    InflightError,
    UpdateBusy,
    WrongPhase,
)
from vllm.inflight.worker.staging.loader import UpdateLoader
from vllm.inflight.worker.staging.thread import StagingThread

pytestmark = pytest.mark.engine

WHOLE, PART, END = (
    "update_weights_from_collective",
    "broadcast_parameter",
    "process_weights_after_loading",
)


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path]) -> Iterator[EngineCore]:
    with extended_core(folders["old"], "tests.support.frameworks.ends.Ends") as core:
        yield core


@pytest.fixture(autouse=True)
def begun(core: EngineCore, folders: dict[str, Path]) -> None:
    CALLED.clear()
    FAULTS.clear()
    SOURCE["file"] = folders["new"] / "model.safetensors"
    core.vllm_inflight.adoption._failed.clear()


class Verifying:
    """The verification of versions, which a test holds up."""

    def __init__(self) -> None:
        self.has_begun, self._may_go_on = threading.Event(), threading.Event()

    def hold(self) -> None:
        """Note that it has begun, and wait until it may go on."""
        self.has_begun.set()
        assert self._may_go_on.wait(30)

    def go_on(self) -> None:
        """Let it go on, now and from here on."""
        self._may_go_on.set()


@pytest.fixture
def verifying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifying]:
    held, prepare = Verifying(), StagingThread._prepare

    def slow(self: StagingThread, command: Any) -> None:
        held.hold()
        prepare(self, command)

    monkeypatch.setattr(StagingThread, "_prepare", slow)
    yield held
    held.go_on()


def in_thread(act: Callable[[], Any]) -> Callable[[], Any]:
    """Begin `act` in a thread; call the result for what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except InflightError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def joined() -> Any:
        thread.join(60)
        return found[0]

    return joined


def digest(core: EngineCore) -> Any:
    return call(core, "info")["digest"]


def send_parts(core: EngineCore, names: list[str]) -> Any:
    return core.collective_rpc(PART, args=(names, [], [], "g", False))


def test_a_cache_reset_while_a_marked_version_is_verified_does_not_end_it(
    core, verifying
):
    result = in_thread(lambda: core.collective_rpc(WHOLE))
    assert verifying.has_begun.wait(30)
    core.reset_prefix_cache()
    verifying.go_on()
    assert result() == [True]
    assert digest(core) is not None


def test_another_version_while_one_is_committed_is_rejected_as_busy(core, verifying):
    result = in_thread(lambda: core.collective_rpc(WHOLE))
    assert verifying.has_begun.wait(30)
    with pytest.raises(UpdateBusy, match="again after it"):
        core.collective_rpc(WHOLE)
    verifying.go_on()
    assert result() == [True]
    assert core.collective_rpc(WHOLE) == [True]


def test_a_part_after_the_end_mark_is_rejected_and_changes_nothing(core, verifying):
    names = list(load_file(SOURCE["file"]))
    assert send_parts(core, names) == [names]
    result = in_thread(lambda: core.collective_rpc(END))
    assert verifying.has_begun.wait(30)
    with pytest.raises(UpdateBusy, match="again after it"):
        send_parts(core, names[:1])
    verifying.go_on()
    assert result() == ["done"]
    assert CALLED == [("part", True), ("end", True)]


def test_the_end_of_a_version_that_has_failed_is_rejected(core):
    names = list(load_file(SOURCE["file"]))
    send_parts(core, names[:3])
    core.reset_prefix_cache()
    with pytest.raises(WrongPhase, match="before ROLL had marked the end"):
        core.collective_rpc(END)
    assert ("end", False) not in CALLED
    assert send_parts(core, names) == [names]
    assert core.collective_rpc(END) == ["done"]


def test_after_a_call_without_tensors_nothing_is_rolled_back_to(core, folders):
    publish(core, folders["new"], "new")
    publish(core, folders["old"], "old")
    before = answers(core, "before")
    FAULTS["writes"] = "model.norm.weight"
    assert core.collective_rpc(WHOLE) == [True]
    assert answers(core, "after") == before
    assert call(core, "info")["previous"] is None
    publish(core, folders["new"], "new")
    call(core, "rollback")
    assert answers(core, "rolled back") == before


def test_a_method_sees_the_default_device_of_worker_calls_and_the_loader_its_own(
    core, folders, monkeypatch
):
    digest_of_new = publish(core, folders["new"], "new")["digest"]
    expected = answers(core, "expected")
    publish(core, folders["old"], "old")
    load, in_loader = UpdateLoader.load_weights, []

    def noting(self, weights):
        in_loader.append(torch.empty(0).device.type)

        def pairs():
            for pair in weights:
                in_loader.append(torch.empty(0).device.type)
                yield pair

        return load(self, pairs())

    monkeypatch.setattr(UpdateLoader, "load_weights", noting)
    DEVICES.clear()
    with torch.device("meta"):
        assert core.collective_rpc(WHOLE) == [True]
    assert set(DEVICES) == {"meta"} and len(DEVICES) > 10
    assert set(in_loader) == {"cpu"} and len(in_loader) > 10
    assert digest(core) == digest_of_new
    assert answers(core, "after") == expected


def test_after_ctrl_c_the_next_version_is_taken(core):
    FAULTS["sleep_s"] = 2.0
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.7, signal.raise_signal, [signal.SIGINT])
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            core.collective_rpc(WHOLE)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)
    FAULTS.clear()
    deadline = time.monotonic() + 30
    while core.vllm_inflight.updates.ledger.active is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert core.collective_rpc(WHOLE) == [True]
