"""An engine that a framework's own trainer updates while requests run.

Usage: python -m tests.support.frameworks.trained FRAMEWORK OLD NEW RANKS PAUSES

Worker extension and sender are those of the package, unmodified, and the trainer is a
process of its own. On GPUs OpenRLHF sends over NCCL from another GPU, and verl lends
memory of the engine's own GPUs. PAUSES is a value of `--inflight-pauses`; with `absorb`
each update is made in a pause, as prime-rl makes it. Both checkpoints are in float32.

Prints what was served as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks.trainer import FILES, JOB, TrainerProcess, Version
from tests.support.engines import oracle
from tests.support.engines.probe import greedy, outputs_during
from tests.support.engines.reference import Reference
from tests.support.engines.script import OPTIONS, tell
from vllm.inflight.transport.waiting import in_background

NUM_UPDATES = 7
"""Of the requests that run; the last one brings NEW."""
NUM_REPLAYED = 12
DEADLINE_S, LATE_S = 8.0, 11.0
"""Of an update, and for how long a trainer that is late sends nothing."""
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
        step = llm.llm_engine.step

        def counted() -> Any:
            self.steps += 1
            return step()

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
            made.append(updates.send(folders[kind]) | {"of": kind})

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


def main(framework: str, old: Path, new: Path, num_ranks: int, pauses: str) -> None:
    from vllm import LLM

    folders = {"old": old, "new": new}
    inflight = {"pauses": pauses, "update_deadline_s": DEADLINE_S}
    own: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": not torch.cuda.is_available(),
        "tensor_parallel_size": num_ranks,
        "worker_extension_cls": f"benchmarks.frameworks.extensions.{framework}",
        "additional_config": {"inflight": inflight},
    }
    with trainer_of(framework, num_ranks) as trainer:
        llm: Any = LLM(str(old), **(OPTIONS | own))
        updates = Updates(llm, trainer, in_pause=pauses == "absorb")
        seen: dict[str, Any] = {"before": greedy(llm)}
        llm.update_weights_from_disk(str(new), "files")
        seen["digest of files"] = llm.weight_info()["digest"]
        llm.update_weights_from_disk(str(old), "start")
        outputs, seen["updates"] = under_load(llm, updates, folders)
        seen["after"] = greedy(llm)
        seen["not of files"] = llm.collective_rpc(oracle.differing_on, args=(str(new),))
        spans = [len(o.outputs[0].weight_versions) for o in outputs]
        seen["spanning"] = sum(number > 1 for number in spans)
        llm.rollback_weights()
        seen["rolled back"] = greedy(llm)
        if framework == "openrlhf":
            seen["late"] = late(llm, updates, new)
            seen["after late"] = updates.send(new)
            seen["said after late"] = greedy(llm)
        seen["mismatches"] = replayed(outputs, seen["updates"], folders)
        tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ[JOB] = str(os.getpid())
    framework, old, new, ranks, pauses = sys.argv[1:]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("01"[: int(ranks)])
    main(framework, Path(old), Path(new), int(ranks), pauses)
