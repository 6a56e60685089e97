"""Patches of modules that not every process can import."""

import sys
from types import ModuleType

import pytest

from vllm.inflight import patch
from vllm.inflight.patch import sleep
from vllm.inflight.patch.records.record import Patch


def test_a_late_patch_is_applied_when_its_module_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Allocator:
        def sleep(self) -> str:
            return "upstream"

    module = ModuleType("of_a_driver")
    module.Allocator = Allocator  # type: ignore[attr-defined]
    late = Patch(
        target="of_a_driver:Allocator.sleep",
        expects=("self",),
        why="a test",
        remove_when="never",
        around=lambda original: lambda self: f"{original(self)}, patched",
        is_late=True,
    )
    monkeypatch.setattr(patch, "_applied", False)
    monkeypatch.setattr(patch, "all_patches", lambda: [late])
    monkeypatch.setattr(patch, "_register_backends", lambda: None)
    patch.apply_all()  # the module cannot be imported yet
    monkeypatch.setitem(sys.modules, "of_a_driver", module)
    patch.apply_late("another")
    assert Allocator().sleep() == "upstream"
    patch.apply_late("of_a_driver")
    patch.apply_late("of_a_driver")
    assert Allocator().sleep() == "upstream, patched"


def test_the_allocator_of_a_gpu_is_imported_by_no_process_that_does_not_sleep() -> None:
    of_a_gpu = [each for each in sleep.PATCHES if each.only_on == "cuda"]
    assert of_a_gpu and all(each.is_late for each in of_a_gpu)
