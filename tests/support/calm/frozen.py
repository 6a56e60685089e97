"""Imported last of all by a server that processes are forked off.

What is there by then stays: no collection of theirs goes through it, which would take a
quarter of a second each and copy its pages. That holds after the end of an engine, too:
another engine of the same process, and its ranks, begin as the first one did.
"""

from vllm.platforms.cpu import CpuPlatform

from tests.support.calm.engine_starts import (
    collect_once_per_engine,
    freeze_imports,
    inspect_models_here,
    leave_helpers_uncompiled,
    multiply_fp8_by_torch,
    override_kernels_once,
)

collect_once_per_engine()
override_kernels_once()
inspect_models_here()
leave_helpers_uncompiled()
multiply_fp8_by_torch()
if hasattr(CpuPlatform, "register_triton_kernel_overrides"):  # from 0.31 on
    CpuPlatform.register_triton_kernel_overrides()
freeze_imports(engines_may=True)
