"""What has run of each known call, for the table of the page on frameworks.

A test compares this with the table of known calls, with the versions that the Makefile
installs, and with the results of the last runs (docs/framework-runs.json).
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
        test: the file of the tests, below tests/.
        version: of the framework; empty for what is by hand.
        case: what the names of the tests have; empty for all tests of the file.

    """

    of: str
    where: str
    test: str
    version: str = ""
    case: str = ""

    def __str__(self) -> str:
        return f"{self.of}{self.version and f' of {self.version}'}"


PACKAGES, TRAINERS = "e2e/test_framework_packages.py", "e2e/test_framework_trainers.py"
SERVER = "e2e/test_checkpoint_engine.py"
DELTAS = "e2e/test_framework_deltas.py"
ON_GPUS = "gpu/test_frameworks.py"


def _package(version: str, *names: str) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(EXTENSION, CPU, PACKAGES, version, f"[{name}]") for name in names
    )


def _trainer(version: str, case: str, of: str = BOTH_ENDS) -> Evidence:
    return Evidence(of, CPU, TRAINERS, version, case)


def _on_gpus(version: str, case: str, of: str = BOTH_ENDS) -> Evidence:
    return Evidence(of, GPU, ON_GPUS, version, case)


def _adopted_by_hand(name: str) -> tuple[Evidence, ...]:
    file = "e2e/test_adopted_by_hand.py"
    return (Evidence(BY_HAND, CPU, file, case=f"[{name}]"),)


def _declared(case: str) -> tuple[Evidence, ...]:
    return (Evidence(BY_HAND, CPU, "e2e/test_declared_writes.py", case=case),)


OPENRLHF, VERL, SWIFT, CHECKPOINT_ENGINE = "0.11.2", "0.9.1", "4.6.0", "0.4.2"
SKYRL, AREAL = "0.3.0", "1.0.4"
AUGUST, JUNE = "August 2026", "June 2026"
"""Of repositories whose worker files no package has."""

SEEN: dict[tuple[str, str, tuple[str, ...]], tuple[Evidence, ...]] = {
    ("OpenRLHF", "update_weight", ()): (
        _trainer(OPENRLHF, "[openrlhf]"),
        _on_gpus(OPENRLHF, "[openrlhf]"),
        *_package(OPENRLHF, "openrlhf"),
    ),
    ("OpenRLHF", "update_weight_cuda_ipc", ()): (
        _trainer(OPENRLHF, "[openrlhf_ipc]", EXTENSION),
        _on_gpus(OPENRLHF, "[openrlhf_ipc]", EXTENSION),
    ),
    ("verl", "update_weights_from_ipc", ()): (
        _trainer(VERL, "verl"),
        _on_gpus(VERL, "[verl]"),
        *_package(VERL, "verl", "verl_fp8", "verl_fp8_packed"),
    ),
    ("ms-swift", "update_weights_from_ipc", ()): _package(SWIFT, "swift"),
    ("ms-swift", "update_named_param", ()): _package(SWIFT, "swift_nccl"),
    ("ms-swift", "update_flattened_params", ()): _package(SWIFT, "swift_flattened"),
    ("ms-swift", "process_weights_after_loading", ()): _package(
        SWIFT, "swift_nccl", "swift_flattened"
    ),
    ("checkpoint-engine", "update_weights_from_ipc", ()): (
        Evidence(BOTH_ENDS, CPU, SERVER, CHECKPOINT_ENGINE),
        *_package(CHECKPOINT_ENGINE, "checkpoint_engine"),
    ),
    ("prime-rl", "update_weights_from_path", ("weight_path",)): (
        _trainer(AUGUST, "[prime_rl]", EXTENSION),
        _on_gpus(AUGUST, "[prime_rl]", EXTENSION),
    ),
    ("prime-rl", "update_weights_from_path", ("weight_dir",)): (
        *_package(AUGUST, "prime_rl_nccl"),
        *_adopted_by_hand("PrimeRL"),
    ),
    ("prime-rl", "update_weights_from_path", ("apply_transfer_plan",)): _declared(
        "keeps_live_tensors"
    ),
    ("SkyRL", "skyrl_start_weight_update", ()): _package(SKYRL, "skyrl"),
    ("SkyRL", "update_weights_ipc", ()): _package(SKYRL, "skyrl"),
    ("SkyRL", "update_weights_nccl", ()): (
        *_package(AUGUST, "skyrl_head"),
        *_adopted_by_hand("SkyRL"),
    ),
    ("SkyRL", "skyrl_finish_weight_update", ()): _package(SKYRL, "skyrl"),
    ("AReaL", "areal_update_weight_xccl", ()): _package(AREAL, "areal"),
    ("AReaL", "areal_update_weights", ()): _package(AREAL, "areal_files"),
    ("NeMo-RL", "update_weights_from_collective", ()): _package(AUGUST, "nemo_rl"),
    ("NeMo-RL", "update_weights_via_ipc_zmq", ()): _package(AUGUST, "nemo_rl_zmq"),
    ("NeMo-RL", "nccl_reshard_refit", ()): _declared("-nccl_reshard_refit-"),
    ("NeMo-RL", "update_weights_from_decoded_sparse_payload", ()): (
        Evidence(EXTENSION, CPU, DELTAS, AUGUST, "nemo_rl"),
        *_declared("-update_weights_from_decoded_sparse_payload-"),
    ),
    ("ROLL", "broadcast_parameter", ()): _package(AUGUST, "roll"),
    ("ROLL", "update_parameter_in_bucket", ()): _package(AUGUST, "roll_buckets"),
    ("ROLL", "process_weights_after_loading", ()): _package(
        AUGUST, "roll", "roll_buckets"
    ),
    ("PipelineRL", "receive_weight_update", ()): _package(JUNE, "pipelinerl"),
}
"""Framework, method and, where two rows share those, parameters or methods besides →
what ran."""


def evidence_of(row: KnownCall) -> tuple[Evidence, ...]:
    """What has run of a known call."""
    keys = (
        (row.framework, row.method, parameters)
        for parameters in (row.besides, row.parameters, ())
    )
    return next(SEEN[key] for key in keys if key in SEEN)
