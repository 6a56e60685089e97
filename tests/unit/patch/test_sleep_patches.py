"""Patches of upstream's sleep, around a worker that fails."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.inflight.patch import sleep as patches
from vllm.inflight.worker.integrity import outside_writes

Noted = list[tuple[object, object]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    found: Noted = []
    monkeypatch.setattr(
        outside_writes,
        "note_asleep",
        lambda worker, parts, kept: found.append((parts, kept)),
    )
    return found


def asleep_after(error: AssertionError | None) -> None:
    """The sleep of a worker that has given its memory back, and raises `error`."""

    def original(self: Any, level: int) -> None:
        if error is not None:
            raise error

    worker = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    patches._noted_asleep(original)(worker, 1)


def test_a_sleep_succeeds_if_another_process_takes_memory_meanwhile(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(patches.logger, "warning", warnings.append)
    asleep_after(AssertionError("Memory usage increased after sleeping."))
    assert noted == [(("weights", "kv_cache"), ("weights",))]
    assert len(warnings) == 1 and "other processes" in warnings[0]


def test_any_other_error_of_a_sleep_is_raised(noted: Noted) -> None:
    with pytest.raises(AssertionError, match="nothing was mapped"):
        asleep_after(AssertionError("nothing was mapped"))
    assert not noted, "upstream's own allocator has noted what it has given back"
    asleep_after(None)
    assert len(noted) == 1
