"""The table of tests on GPUs: what each file proves, and where it last ran.

`make test-gpu` writes a JUnit file. `python -m docs.gpu_runs JUNIT... --card H200
--vllm 0.32.0` keeps its results in docs/gpu-runs.json, of which the table is made.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from docs.junit import RESULTS, cases
from docs.tables import code, first_line, table

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "gpu-runs.json"
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

GPUS = re.compile(r"(?:device_count\(\) < |\bneeds\()(\d)")
"""In a file whose tests are skipped on fewer; the first one is that of most tests."""
RANKED = "tests.support.gpu.ranked"
"""In a file whose engines have two ranks."""

Runs = dict[str, dict[str, Any]]


def read() -> Runs:
    """Test file → result of its last run."""
    runs: Runs = json.loads(FILE.read_text()) if FILE.exists() else {}
    return runs


def results(junit: Path) -> dict[str, Counter[str]]:
    """Test file → number of tests by result, of one JUnit file."""
    found: dict[str, Counter[str]] = {}
    for case in cases(junit):
        if case.file:
            found.setdefault(case.file, Counter())[case.result] += 1
    return found


def record(junits: list[Path], card: str, vllm: str, runs: Runs | None = None) -> Runs:
    """`runs` with the results of JUnit files; a file that only skipped is left out."""
    runs = read() if runs is None else runs
    found: dict[str, Counter[str]] = {}
    for junit in junits:
        for file, counts in results(junit).items():
            found.setdefault(file, Counter()).update(counts)
    for file, counts in found.items():
        if counts["passed"] or counts["failed"]:
            facts = {"card": card, "vllm": vllm, "date": date.today().isoformat()}
            runs[file] = dict(counts) | facts
    return runs


def gpu_runs() -> str:
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
        _num_gpus(text),
        _last(runs.get(str(file.relative_to(ROOT)))),
    ]


def _num_gpus(text: str) -> str:
    if (found := GPUS.search(text)) is not None:
        return found[1]
    return "2" if RANKED in text else "1"


def _on_cpu(file: Path) -> str:
    name = ON_CPU.get(file.stem, f"e2e/{file.name}")
    return code(name) if (ROOT / "tests" / name).exists() else "no"


def _last(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not recorded"
    counts = ", ".join(f"{run[kind]} {kind}" for kind in RESULTS if kind in run)
    return f"{counts}; {run['card']}, vLLM {run['vllm']}, {run['date']}"


def main(argv: list[str] | None = None) -> None:
    """Keep the results of a run."""
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("junit", type=Path, nargs="+")
    parser.add_argument("--card", required=True, help="as H200")
    parser.add_argument("--vllm", required=True, help="release, as 0.32.0")
    args = parser.parse_args(argv)
    runs = record(args.junit, args.card, args.vllm)
    lines = (f"  {json.dumps(f)}: {json.dumps(run)}" for f, run in sorted(runs.items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
