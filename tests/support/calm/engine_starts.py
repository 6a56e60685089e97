"""What several engines of one process, or of its forks, need to do only once."""

import functools
import gc
import sys


def freeze_imports() -> None:
    """Keep what was imported out of every later collection of garbage.

    vLLM collects garbage four times for each engine, and each time it would look
    through a million objects of torch and of itself. An engine that ends also thaws
    everything, so from here on nothing is frozen or thawed: what an engine made stays
    collectable. `thawed` undoes it, for a test of what a frozen engine leaves.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = _do_nothing


def override_kernels_once() -> None:
    """Have vLLM look through all modules for Triton's kernels once per process.

    On a CPU every worker does so, and would put wrappers around the wrappers.
    """
    module = sys.modules.get("vllm.platforms.cpu")
    if module is None:
        return
    platform = module.CpuPlatform
    if not hasattr(platform, "register_triton_kernel_overrides"):
        return  # before 0.31
    once = functools.cache(platform.register_triton_kernel_overrides)
    platform.register_triton_kernel_overrides = staticmethod(once)


class thawed:
    """Within it, `gc.freeze` and `gc.unfreeze` are Python's own."""

    def __enter__(self) -> None:
        gc.freeze, gc.unfreeze = FREEZE, UNFREEZE

    def __exit__(self, *_: object) -> None:
        freeze_imports()


FREEZE, UNFREEZE = gc.freeze, gc.unfreeze


def _do_nothing() -> None:
    """Stand in for `gc.freeze` and `gc.unfreeze`."""
