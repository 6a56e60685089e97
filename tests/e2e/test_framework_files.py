"""What is said of frameworks agrees with their own files.

The files are read and not imported, so this holds also for those that do not start on
this vLLM, and whose calls the tests make by hand.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.frameworks.packages import PACKAGES
from tests.support.frameworks.overview import FRAMEWORKS
from vllm.inflight.frameworks.known_call import KnownCall
from vllm.inflight.frameworks.table import BUILT_IN

pytestmark = pytest.mark.slow

SKYRL = "skyrl/skyrl/backends/skyrl_train/inference_servers"
PRIME_RL = "prime_rl/prime_rl/inference/vllm/worker"
FILES = {
    "OpenRLHF": ["openrlhf/openrlhf/trainer/ray/vllm_worker_wrap.py"],
    "verl": ["verl/verl/workers/rollout/vllm_rollout/utils.py"],
    "ms-swift": ["swift/swift/pipelines/infer/rollout.py"],
    "checkpoint-engine": ["checkpoint_engine/checkpoint_engine/worker.py"],
    "prime-rl": [f"{PRIME_RL}/{name}.py" for name in ("filesystem", "nccl", "nixl")],
    "SkyRL": [
        f"{SKYRL}/{name}.py"
        for name in ("layerwise_reload", "new_inference_worker_wrap")
    ],
    "AReaL": ["areal/areal/engine/vllm_ext/vllm_worker_extension.py"],
    "NeMo-RL": ["nemo_rl/nemo_rl/models/generation/vllm/vllm_backend.py"],
    "ROLL": ["roll/roll/third_party/vllm/worker.py"],
    "PipelineRL": ["pipelinerl/pipelinerl/vllm1.py"],
}
"""Framework → the files of its worker extensions, below build/frameworks."""


def methods(file: Path) -> Iterator[dict[str, list[str]]]:
    """For each class of a file its methods, with the names of the parameters."""
    for found in ast.walk(ast.parse(file.read_text())):
        if isinstance(found, ast.ClassDef):
            yield {
                each.name: parameters(each.args)
                for each in found.body
                if isinstance(each, ast.FunctionDef)
            }


def parameters(args: ast.arguments) -> list[str]:
    _, *names = [each.arg for each in (*args.posonlyargs, *args.args)] or [""]
    several = [] if args.vararg is None else [f"*{args.vararg.arg}"]
    return [*names, *several, *(each.arg for each in args.kwonlyargs)]


@pytest.mark.parametrize("row", BUILT_IN, ids=lambda row: row.signature)
def test_a_class_of_the_framework_has_the_method_with_these_parameters(
    row: KnownCall,
) -> None:
    assert PACKAGES.is_dir(), "run `make test-frameworks`"
    found = [
        of_class
        for file in FILES[row.framework]
        for of_class in methods(PACKAGES / file)
    ]
    assert any(row.is_of(of_class) for of_class in found), [
        of_class[row.method] for of_class in found if row.method in of_class
    ]


REQUIREMENTS = {
    "TRL": "trl",
    "OpenRLHF": "openrlhf",
    "verl": "verl",
    "ms-swift": "swift",
    "checkpoint-engine": "checkpoint_engine",
    "SkyRL": "skyrl",
}
"""Framework → the folder of its package, if vLLM would be a requirement of that."""


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_the_overview_says_which_vllm_a_package_requires_and_only_extras_do(
    name: str,
) -> None:
    assert PACKAGES.is_dir(), "run `make test-frameworks`"
    (framework,) = [each for each in FRAMEWORKS if each.name == name]
    folder = PACKAGES / REQUIREMENTS[name]
    lines = [
        line
        for file in folder.glob(f"*-{framework.release}.dist-info/METADATA")
        for line in file.read_text().splitlines()
        if re.match(r"Requires-Dist: vllm[^-\w]", line)
    ]
    said = re.findall(r"0\.[\d.]*\d", framework.vllm)
    assert bool(said) == bool(lines)
    for number in said:
        assert any(number in line for line in lines), (number, lines)
    assert all("extra ==" in line for line in lines)
