"""What has run of each known call, for the table of the page on frameworks.

A test compares this with the table of known calls, with the versions that the Makefile
installs, and with the tests that exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.inflight.frameworks.known_call import KnownCall

BY_HAND = "by hand"
"""A class of the tests makes the framework's call, written after its code was read."""
EXTENSION = "own extension"
"""The package's own worker extension ran, unmodified."""
BOTH_ENDS = "own transport and extension"
"""The package's own code ran at both ends, unmodified, in two processes."""
CPU, GPU = "CPU build", "H200"


@dataclass(frozen=True)
class Evidence:
    """One way in which a known call ran.

    Attributes:
        of: what of the framework ran.
        where: the kind of machine.
        test: the file of the test, below tests/.
        version: of the framework; empty for what is by hand.

    """

    of: str
    where: str
    test: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.of}{self.version and f' of {self.version}'}, {self.where}"


RECORDED = (Evidence(BY_HAND, CPU, "e2e/test_adopted_recordings.py"),)
DECLARED = (Evidence(BY_HAND, CPU, "e2e/test_declared_writes.py"),)


PACKAGES, TRAINERS = "e2e/test_framework_packages.py", "e2e/test_framework_trainers.py"
ON_GPUS = "gpu/test_frameworks.py"


def _package(version: str) -> Evidence:
    return Evidence(EXTENSION, CPU, PACKAGES, version)


def _both_ends(version: str, where: str = CPU, test: str = TRAINERS) -> Evidence:
    return Evidence(BOTH_ENDS, where, test, version)


OPENRLHF, VERL, SWIFT, CHECKPOINT_ENGINE = "0.11.2", "0.9.1", "4.6.0", "0.4.2"
SKYRL, AREAL = "0.3.0", "1.0.4"
PRIME_RL = "August 2026"

SEEN: dict[tuple[str, str, tuple[str, ...]], tuple[Evidence, ...]] = {
    ("OpenRLHF", "update_weight", ()): (
        _both_ends(OPENRLHF),
        _both_ends(OPENRLHF, GPU, ON_GPUS),
    ),
    ("OpenRLHF", "update_weight_cuda_ipc", ()): (
        Evidence(EXTENSION, CPU, TRAINERS, OPENRLHF),
    ),
    ("verl", "update_weights_from_ipc", ()): (
        _both_ends(VERL),
        _both_ends(VERL, GPU, ON_GPUS),
    ),
    ("ms-swift", "update_weights_from_ipc", ()): (_package(SWIFT),),
    ("ms-swift", "update_named_param", ()): (_package(SWIFT),),
    ("ms-swift", "update_flattened_params", ()): (_package(SWIFT),),
    ("ms-swift", "process_weights_after_loading", ()): (_package(SWIFT),),
    ("checkpoint-engine", "update_weights_from_ipc", ()): (
        _package(CHECKPOINT_ENGINE),
    ),
    ("prime-rl", "update_weights_from_path", ("weight_path",)): (
        Evidence(EXTENSION, CPU, TRAINERS, PRIME_RL),
        Evidence(EXTENSION, GPU, ON_GPUS, PRIME_RL),
    ),
    ("prime-rl", "update_weights_from_path", ("weight_dir",)): (
        _package(PRIME_RL),
        *RECORDED,
    ),
    ("prime-rl", "update_weights_from_path", ("apply_transfer_plan",)): DECLARED,
    ("SkyRL", "skyrl_start_weight_update", ()): (_package(SKYRL),),
    ("SkyRL", "update_weights_ipc", ()): (_package(SKYRL),),
    ("SkyRL", "skyrl_finish_weight_update", ()): (_package(SKYRL),),
    ("AReaL", "areal_update_weight_xccl", ()): (_package(AREAL),),
    ("AReaL", "areal_update_weights", ()): (_package(AREAL),),
    ("NeMo-RL", "nccl_reshard_refit", ()): DECLARED,
    ("NeMo-RL", "update_weights_from_decoded_sparse_payload", ()): DECLARED,
}
"""Framework, method and, where two rows share those, parameters or methods besides →
what ran. Of all others the calls were made by hand."""


def evidence_of(row: KnownCall) -> tuple[Evidence, ...]:
    """What has run of a known call."""
    for parameters in (row.besides, row.parameters, ()):
        key = row.framework, row.method, parameters
        if key in SEEN:
            return SEEN[key]
    return RECORDED
