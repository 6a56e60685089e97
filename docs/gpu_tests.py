"""The table of tests on GPUs: what each file proves, and where its tests last ran."""

from __future__ import annotations

import ast
from pathlib import Path

from docs.gpu_runs import ROOT, Runs, read, told
from docs.tables import code, first_line, table
from tests.support.gpu_lanes.num_gpus import usable

HEADER = ("test file", "what it proves", "also on the CPU", "GPUs", "last run")

ON_CPU = {
    "test_gpu_digest": "unit/ops/test_digest.py",
    "test_delta_codec": "unit/delta/test_device_codec.py",
    "test_dp_sources": "e2e/test_fed_engines.py",
    "test_files": "e2e/test_file_reader.py",
    "test_frameworks": "e2e/test_framework_trainers.py",
    "test_ranks_fed_deltas": "e2e/test_trainer_deltas.py",
    "test_ranks_fed_from_third_gpu": "e2e/test_fed_engines.py",
    "test_two_ranks_sleep": "e2e/test_sleep.py",
    "test_automatic_scrubs": "e2e/test_scrub.py",
    "test_memory_of_deltas": "e2e/test_leaks.py",
    "test_soak": "robustness/soak/test_soak.py",
    "test_trainer": "e2e/test_trainer_failures.py",
    "test_nccl_from_second_gpu": "e2e/test_fed_engines.py",
    "test_dp_commit": "e2e/simulated/test_dp_commit.py",
    "test_dp_pauses": "e2e/simulated/test_dp_pauses.py",
    "test_dense": "unit/worker/test_dense.py",
    "test_arena": "unit/worker/test_arena.py",
    "test_ipc": "unit/transport/test_ipc.py",
    "test_delta_ranks": "e2e/test_deltas.py",
    "test_sglang_handles": "unit/transport/test_torch_exports.py",
    "test_engine": "e2e/test_update.py",
    "test_expert_ranks": "e2e/test_experts.py",
    "test_subset_ranks": "e2e/test_subset.py",
    "test_adapter_ranks": "e2e/test_adapters.py",
    "test_adapter_load_ranks": "e2e/test_adapter_loads.py",
    "test_pauses_ranks": "robustness/pauses/test_two_ranks.py",
    "test_pauses_ranks_special": "robustness/pauses/test_two_ranks.py",
} | {
    f"test_pauses_{subject}": f"robustness/pauses/test_{subject}.py"
    for subject in (
        *("adapter", "delta_staging", "dense", "drafted", "experts", "quantised"),
        "uses",
    )
}
"""GPU test file → what proves the same on the CPU, if it has another name."""


def gpu_tests() -> str:
    """Every test file that needs a GPU."""
    runs = read()
    rows = [_row(file, runs) for file in _files()]
    return table(HEADER, rows)


def _files() -> list[Path]:
    return sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def _row(file: Path, runs: Runs) -> list[str]:
    text = file.read_text()
    proves = first_line(ast.get_docstring(ast.parse(text)))
    return [
        code(file.name),
        proves,
        _on_cpu(file),
        _num_gpus(file),
        told(runs.get(str(file.relative_to(ROOT)))),
    ]


def _num_gpus(file: Path) -> str:
    return " to ".join(str(number) for number in sorted(set(usable(file))))


def _on_cpu(file: Path) -> str:
    name = ON_CPU.get(file.stem, f"e2e/{file.name}")
    return code(name) if (ROOT / "tests" / name).exists() else "no"
