"""Compiling Triton kernels for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.preloaded_process import run


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


def compiles(call: str, folder: Path) -> None:
    """Run `module:function` in a process of its own; fails with its last lines.

    Args:
        call: of a function without arguments.
        folder: of Triton's cache, to compile.

    """
    module, name = call.split(":")
    code = f"from {module} import {name} as run; run()"
    done = run("-c", code, env={"TRITON_CACHE_DIR": str(folder)})
    assert done.returncode == 0, done.stderr[-3000:]
