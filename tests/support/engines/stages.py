"""Two pipeline stages, run as a script: prints what happened as JSON.

Usage: python -m tests.support.engines.stages A B eager|compiled TENSOR_PARALLEL_SIZE
"""

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.engines.probe import checksums, greedy, outputs_during
from tests.support.engines.script import OPTIONS, tell
from vllm.inflight.errors import InflightError

NUM_COMMITS = 41
ROWS = 1000
"""More than a tensor has."""
Reply = dict[str, Any]


def start(folder: str, mode: str, tp_size: int) -> Any:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    llm = LLM(
        folder,
        pipeline_parallel_size=2,
        tensor_parallel_size=tp_size,
        dtype="float32",
        weight_transfer_config=WeightTransferConfig(backend="other"),
        worker_extension_cls="tests.support.engines.transport.Extension",
        # Staging need not be modest here: it is the commits that are looked at.
        additional_config={"inflight": {"stage_share": 1.0}},
        **(OPTIONS | {"enforce_eager": mode == "eager"}),
    )
    if mode == "eager":
        llm.collective_rpc("tests_make_room")
    return llm


def state(llm: Any) -> Reply:
    """What is said, and what every rank serves."""
    return {"tokens": greedy(llm), "ranks": checksums(llm)}


def send(llm: Any, folder: str, **faults: Any) -> Reply:
    """One update by the transport "other", and what became of it."""
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"path": folder, **faults}})
        llm.finish_weight_update("b")
    except InflightError as error:
        return error.to_dict()
    return {"code": "committed"}


def refused(llm: Any, folder: str, tensors: Any, tp_size: int) -> dict[str, Reply]:
    """Updates that one of the stages, or neither, can take.

    What goes wrong on one rank alone does on the first of its stage.
    """
    first = next(n for n in tensors if ".0." in n and n.endswith(MATRICES))
    names = {"first": first, "last": first.replace(".0.", ".1.")}
    told: dict[str, Reply] = {"names": names}
    for number, (stage, name) in enumerate(names.items()):
        mlp = name.rsplit(".", 2)[0]
        own, other = (tp_size * of for of in (number, 1 - number))
        for fault, how in {
            f"a tensor of the {stage} stage is missing": {"skip": [name]},
            f"the other stage did not get one of the {stage}": {
                "skip": [name],
                "fail_rank": other,
            },
            f"NaN for the {stage} stage": {"poison": name},
            f"the {stage} stage breaks off": {"fail_after": 9, "fail_rank": own},
            f"the {stage} stage is sent too much": {"extra": {f"{mlp}.x": name}},
        }.items():
            told[fault] = send(llm, folder, **how)
    nowhere = first.replace(".0.", ".7.")
    told["what no stage uses is sent"] = send(llm, folder, extra={nowhere: first})
    return told


MATRICES = ("down_proj.weight", "dense_4h_to_h.weight")


def misread(llm: Any, folder: Path) -> list[str]:
    """Tensors that are not read back as they are in the checkpoint."""
    core, wrong = llm.llm_engine.engine_core, []
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "query_key_value" in name:
            continue  # its rows lie in another order than in the checkpoint
        body = {"tensor": name, "num_rows": ROWS}
        (reply,) = [core.call_utility("inflight", "rows", body)]
        rows = reply["ok"]["rows"][: len(tensor)]
        if rows != tensor.float().tolist():
            wrong.append(name)
    return wrong


def streams_during(work: Callable[[], Any], llm: Any) -> list[Reply]:
    """What six requests at a time were told while `work` ran."""
    from vllm import SamplingParams

    sampling = (
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=100, ignore_eos=True, logprobs=0
        )
        for seed in count(1)
    )
    told = []
    for request in outputs_during(work, llm, 6, sampling):
        (said,) = request.outputs
        steps = zip(said.logprobs, said.token_ids, strict=True)
        told.append(
            {
                "prompt": list(request.prompt_token_ids),
                "tokens": list(said.token_ids),
                "logprobs": [step[token].logprob for step, token in steps],
                "spans": [[s.version, s.start, s.end] for s in said.weight_versions],
            }
        )
    return told


def streams_under_commits(llm: Any, a: str, b: str, num_commits: int) -> list[Reply]:
    """What requests were told while `b` and `a` were committed in turn."""

    def publish() -> None:
        for number in range(num_commits):
            label = "ba"[number % 2]
            llm.update_weights_from_disk({"a": a, "b": b}[label], label)

    return streams_during(publish, llm)


def main(a: str, b: str, mode: str, tp_size: int) -> None:
    llm = start(b, mode, tp_size)
    seen: Reply = {"expected": state(llm)}
    llm.llm_engine.engine_core.shutdown()
    llm = start(a, mode, tp_size)
    tensors = load_file(Path(b) / "model.safetensors")
    seen["before"] = state(llm)
    seen["refused"] = refused(llm, b, tensors, tp_size)
    seen["after refusals"] = state(llm)
    seen["label after refusals"] = llm.get_weight_version()
    embedding = next(n for n in tensors if "embed" in n)
    tied = {} if "lm_head.weight" in tensors else {"lm_head.weight": embedding}
    seen["whole"] = send(llm, b, extra=tied)
    seen["after commit"] = state(llm)
    seen["misread"] = misread(llm, Path(b))
    llm.rollback_weights()
    seen["after rollback"] = state(llm)
    llm.update_weights_from_disk(a, "a")

    seen["streams"] = streams_under_commits(llm, a, b, NUM_COMMITS)
    seen["after many commits"] = state(llm)

    def tear() -> None:
        # What nobody can ask for: the last stage changes, and the first does not.
        for _ in range(21):
            llm.collective_rpc("inflight_flip", args=([tp_size], "before"))

    seen["torn streams"] = streams_during(tear, llm)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    tp_size = int(sys.argv[4])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["0", "1"] * tp_size)
    main(*sys.argv[1:4], tp_size)
