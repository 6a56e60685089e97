"""An engine that frameworks' own trainers update while requests run, in turn.

Usage: python -m tests.support.frameworks.trained OLD NEW RANKS [TRAINER…]

Worker extensions and transports are those of the packages, unmodified. Each trainer is
a process of its own. On GPUs OpenRLHF sends over NCCL from another GPU. verl,
checkpoint-engine and OpenRLHF's colocated trainer lend memory of the engine's own GPUs.
The engine absorbs pauses; prime-rl's trainer pauses around each update. Both
checkpoints are in float32.

Prints what was served as JSON, by framework.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks import extensions
from benchmarks.frameworks.extensions import AND
from benchmarks.frameworks.on_host import JOB
from benchmarks.frameworks.trainer import (
    FILES,
    SENDERS,
    TrainerProcess,
    Version,
)
from tests.support.engines import oracle
from tests.support.engines.mixtures import NORMS, part
from tests.support.engines.probe import greedy, outputs_during
from tests.support.engines.reference import Reference
from tests.support.engines.script import OPTIONS, tell
from tests.support.waiting import until
from vllm.inflight.transport.waiting import in_background

NUM_UPDATES = 7
"""While requests run; the last one brings NEW."""
APART = 25
"""Steps from one update to the next."""
NUM_REPLAYED = 8
IN_PAUSE = ("prime_rl",)
DEADLINE_S, LATE_S = (30.0, 35.0) if torch.cuda.is_available() else (8.0, 11.0)
"""Of an update, and for how long a trainer that is late sends nothing. The first
broadcast over NCCL of a host with many engines takes seconds."""
NOISE = 0.03 if torch.cuda.is_available() else 2e-3
"""As in the tests of tearing."""


class Updates:
    """The engine and its trainer.

    Attributes:
        steps: taken by the engine so far.

    """

    def __init__(self, llm: Any, trainer: TrainerProcess, *, in_pause: bool) -> None:
        self._llm, self._trainer, self._in_pause = llm, trainer, in_pause
        self.steps = 0
        step = type(llm.llm_engine).step

        def counted() -> Any:
            self.steps += 1
            return step(llm.llm_engine)

        llm.llm_engine.step = counted
        trainer.ready()
        trainer.join(self._call)

    def send(self, folder: Path, *, late_s: float = 0) -> dict[str, Any]:
        """One update; what is served then, and how many steps ran meanwhile."""
        before = self.steps
        if self._in_pause:
            self._llm.pause_generation(mode="keep", clear_cache=False)
        self._trainer.carry_out(Version(folder, late_s), self._call)
        steps = self.steps - before
        if self._in_pause:
            self._llm.resume_generation()
        info = self._llm.weight_info()
        told = {key: info[key] for key in ("weight_version", "epoch", "digest")}
        return told | {"steps": steps}

    def wait_for_steps(self, count: int) -> None:
        """Wait until the engine has taken so many more steps."""
        end = self.steps + count
        until(lambda: self.steps >= end)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._llm.collective_rpc(method, args=args, kwargs=kwargs)


@contextmanager
def trainer_of(framework: str, num_ranks: int) -> Iterator[TrainerProcess]:
    trainer = TrainerProcess(framework, FILES, num_ranks)
    try:
        yield trainer
    finally:
        trainer.end()


def under_load(
    llm: Any, updates: Updates, folders: dict[str, Path]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The outputs of requests that run while the weights change, and each update."""
    from vllm import SamplingParams

    made: list[dict[str, Any]] = []

    def update_all() -> None:
        for number in range(NUM_UPDATES):
            kind = "old" if number % 2 else "new"
            updates.wait_for_steps(APART)
            made.append(updates.send(folders[kind]) | {"of": kind})
        updates.wait_for_steps(APART)

    sampling = (
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=200, ignore_eos=True, logprobs=0
        )
        for seed in count(1)
    )
    return outputs_during(update_all, llm, 4, sampling), made


def late(llm: Any, updates: Updates, folder: Path) -> dict[str, Any]:
    """A trainer that stops half-way until its update has failed, and then goes on."""
    label, expected = llm.get_weight_version(), greedy(llm)
    sending = in_background(lambda: updates.send(folder, late_s=LATE_S))
    seen = {"same": True, "rounds": 0}
    while not sending.done():
        seen["same"] = bool(seen["same"]) and greedy(llm) == expected
        seen["rounds"] += 1
    try:
        sending.result()
    except Exception as error:
        seen["error"] = str(error)
    return seen | {"is label kept": llm.get_weight_version() == label}


def incomplete(llm: Any, updates: Updates, folder: Path) -> dict[str, Any]:
    """A trainer sends a version that lacks all tensors but its norms."""
    before = greedy(llm)
    with tempfile.TemporaryDirectory() as at:
        sent = Path(part(folder, NORMS, Path(at)))
        try:
            updates.send(sent)
        except Exception as error:
            return {"error": str(error), "same": greedy(llm) == before}
    return {}


def replayed(
    outputs: list[Any], made: list[dict[str, Any]], folders: dict[str, Path]
) -> list[str]:
    """What tokens of several versions have that is not of the version they name."""
    from tests.e2e.test_tearing import mismatches

    several = [o for o in outputs if len(o.outputs[0].weight_versions) > 1]
    versions = {update["weight_version"]: update["of"] for update in made}
    reference = Reference(folders, torch.float32)
    chosen = several[-NUM_REPLAYED:]
    return mismatches(chosen, reference, "old", NOISE, versions | {"start": "old"})


def updated_by(
    framework: str, llm: Any, folders: dict[str, Path], num_ranks: int
) -> dict[str, Any]:
    """What is served while and after a framework's trainer updates the engine."""
    old, new = folders["old"], folders["new"]
    llm.update_weights_from_disk(str(old), "start")
    with trainer_of(framework, num_ranks) as trainer:
        updates = Updates(llm, trainer, in_pause=framework in IN_PAUSE)
        outputs, made = under_load(llm, updates, folders)
        seen = {"updates": made, "after": greedy(llm)}
        seen["not of files"] = llm.collective_rpc(oracle.differing_on, args=(str(new),))
        spans = [len(o.outputs[0].weight_versions) for o in outputs]
        seen["borders"] = sum(spans) - len(spans)
        llm.rollback_weights()
        seen["rolled back"] = greedy(llm)
        if framework == "openrlhf":
            seen["late"] = late(llm, updates, new)
            updates.send(new)
            seen["after late"] = greedy(llm)
        if framework == "checkpoint_engine":
            seen["incomplete"] = incomplete(llm, updates, new)
        seen["mismatches"] = replayed(outputs, made, folders)
    return seen


def main(old: Path, new: Path, num_ranks: int, frameworks: list[str]) -> None:
    from vllm import LLM

    packages = dict.fromkeys(SENDERS[framework].package for framework in frameworks)
    inflight = {"pauses": "absorb", "update_deadline_s": DEADLINE_S}
    own: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": not torch.cuda.is_available(),
        "tensor_parallel_size": num_ranks,
        "additional_config": {"inflight": inflight},
    }
    if packages:
        own["worker_extension_cls"] = f"{extensions.__name__}.{AND.join(packages)}"
    llm: Any = LLM(str(old), **(OPTIONS | own))
    seen: dict[str, Any] = {"before": greedy(llm)}
    llm.update_weights_from_disk(str(new), "files")
    seen |= {"of files": greedy(llm), "digest": llm.weight_info()["digest"]}
    folders = {"old": old, "new": new}
    for framework in frameworks:
        seen[framework] = updated_by(framework, llm, folders, num_ranks)
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ[JOB] = str(os.getpid())
    old, new, ranks, *frameworks = sys.argv[1:]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("01"[: int(ranks)])
    main(Path(old), Path(new), int(ranks), frameworks)
