"""What several engines of one process, or of its forks, need to do only once."""

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch


def freeze_imports(*, engines_may: bool = False) -> None:
    """Keep what was imported out of every later collection of garbage.

    vLLM collects garbage four times for each engine, and each time it would look
    through a million objects of torch and of itself. An engine that ends also thaws
    everything, so from here on nothing is thawed. Nothing is frozen either: what an
    engine made stays collectable. `thawed` undoes it, for a test of what a frozen
    engine leaves.

    Args:
        engines_may: whether engines freeze what they make, as for users. It stays as
            long as the process then.

    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = _do_nothing
    if not engines_may:
        gc.freeze = _do_nothing


def collect_once_per_engine() -> None:
    """Have vLLM not look for garbage before and after it loads a model.

    The fixtures do, once for each engine: it is most of what a load of a tiny model
    takes.
    """
    for name in COLLECTING:
        if (module := sys.modules.get(name)) is not None:
            module.gc = Uncollected()


class Uncollected:
    """The module `gc` as long as nothing is frozen: its `collect` does nothing."""

    def collect(self, *generation: int) -> int:
        """Collect within `thawed` alone: what is frozen is not garbage then."""
        return 0 if gc.unfreeze is _do_nothing else gc.collect(*generation)

    def __getattr__(self, name: str) -> Any:
        """Any other name of the module."""
        return getattr(gc, name)


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


def inspect_models_here() -> None:
    """Have vLLM look at the class of a model in the process that loads it.

    It would start a process that imports vLLM for that, for the sake of CUDA, wherever
    no file in the user's cache describes the class.
    """
    module = sys.modules.get("vllm.model_executor.models.registry")
    if module is not None and "vllm.platforms.cpu" in sys.modules:
        module._run_in_subprocess = _call


def leave_helpers_uncompiled() -> None:
    """Have vLLM run functions of a few lines as they are, without a compiler.

    Each is compiled at its first call, in each rank of each engine. A C++ compiler
    takes ten seconds for that, and the other rank may spin meanwhile. To load what it
    made for another process takes two.
    """
    if "vllm.platforms.cpu" not in sys.modules:
        return
    for place, name in COMPILED:
        if (module := sys.modules.get(place)) is not None:
            compiled = getattr(module, name)
            plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
            setattr(module, name, plain)


def multiply_fp8_by_torch() -> None:
    """Have torch multiply FP8 matrices by its own kernel, also on a CPU with AMX.

    There it would call oneDNN, which has only its reference kernel for them: that takes
    500 times as long, seconds for each prompt (torch 2.13 on Sapphire Rapids).
    """
    if torch.cuda.is_available() or not torch.cpu._is_amx_tile_supported():
        return
    multiply = torch._scaled_mm

    @functools.wraps(multiply)
    def without_onednn(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return multiply(*args, **kwargs)
        # Its `flags` would set others, too, and warn of those that a CPU has not.
        torch.backends.mkldnn.enabled = False
        try:
            return multiply(*args, **kwargs)
        finally:
            torch.backends.mkldnn.enabled = True

    torch._scaled_mm = without_onednn


class thawed:
    """Within it, `gc.freeze` and `gc.unfreeze` are Python's own."""

    def __enter__(self) -> None:
        gc.freeze, gc.unfreeze = FREEZE, UNFREEZE

    def __exit__(self, *_: object) -> None:
        freeze_imports()


FREEZE, UNFREEZE = gc.freeze, gc.unfreeze

COLLECTING = ("vllm.model_executor.model_loader.base_loader", "vllm.utils.gc_utils")

LAYERS = "vllm.model_executor.layers"
COMPILED = (
    # The tokens that are in a rank's part of the vocabulary
    (f"{LAYERS}.vocab_parallel_embedding", "get_masked_input_and_mask"),
    # The rank of a token among all, for its log probability
    ("vllm.v1.sample.sampler", "batched_count_greater_than"),
)
"""Module, and the function that it calls by that name."""


def _call(function: Callable[[], Any]) -> Any:
    """Stand in for what calls it in a process of its own."""
    return function()


def _do_nothing() -> None:
    """Stand in for `gc.freeze` and `gc.unfreeze`."""
