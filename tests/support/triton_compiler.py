"""Compiling Triton kernels for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def compile_for_gpu(
    kernel: Any, arguments: Mapping[str, str], constants: Sequence[tuple[str, Any]]
) -> None:
    """Compile one kernel; raises what Triton's compiler raises.

    Args:
        kernel: a function under `triton.jit`.
        arguments: name → type, as `*i64`.
        constants: name and value of each `tl.constexpr`.

    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**arguments, **{name: "constexpr" for name, _ in constants}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants))
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["ptx"]


def succeeds(call: str, folder: Path | None = None) -> None:
    """Run `module:function` in a process of its own; fails with its last lines.

    Args:
        call: of a function without arguments.
        folder: of Triton's cache, to compile; None: run under Triton's interpreter.

    """
    module, name = call.split(":")
    more = {"TRITON_INTERPRET": "1"}
    if folder is not None:
        more = {"TRITON_CACHE_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", f"from {module} import {name} as run; run()"],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
