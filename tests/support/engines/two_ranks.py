"""Two tensor-parallel ranks, run as a script: prints what happened as JSON.

Usage: python -m tests.support.engines.two_ranks OLD NEW
"""

import os
import sys
import tempfile
from itertools import repeat
from pathlib import Path
from typing import Any

from tests.support.engines.mixtures import MLP, mixed, part
from tests.support.engines.probe import outputs_during, prompts
from tests.support.engines.script import tell
from tests.support.waiting import until


def main(old: str, new: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig

    from vllm.inflight.errors import InflightError

    def start(folder: str) -> Any:
        return LLM(
            folder,
            tensor_parallel_size=2,
            max_model_len=512,
            block_size=32,
            max_num_seqs=8,
            enforce_eager=True,
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend="other"),
            worker_extension_cls="tests.support.engines.listening.Listening",
        )

    def greedy(llm: Any) -> Any:
        params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
        outputs = llm.generate(prompts(8), params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def send(llm: Any, **faults: Any) -> str:
        llm.start_weight_update()
        try:
            llm.update_weights({"update_info": {"path": new, **faults}})
            llm.finish_weight_update("both")
        except InflightError as error:
            return error.code
        return "committed"

    fresh = start(new)
    expected = greedy(fresh)
    fresh.llm_engine.engine_core.shutdown()
    llm = start(old)
    # It has not stepped, and its queues spin from one call to the next.
    llm.collective_rpc("tests_listen")
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": new}})
    llm.abort_weight_update()
    seen: dict[str, Any] = {"rests when idle": llm.collective_rpc("tests_rests")}
    seen |= {"before": greedy(llm), "expected": expected}
    name = "model.layers.0.mlp.down_proj.weight"
    for rank in (0, 1):
        seen[f"rank {rank} broken"] = send(llm, fail_after=9, fail_rank=rank)
        seen[f"rank {rank} short"] = send(llm, skip=[name], fail_rank=rank)
        seen[f"rank {rank} poisoned"] = send(llm, poison=name, fail_rank=rank)
        seen[f"after rank {rank}"] = greedy(llm)
        seen[f"label after rank {rank}"] = llm.get_weight_version()
    larger = (name, "model.layers.1.self_attn.q_proj.weight")
    seen["larger"] = [send(llm, double=name) for name in larger]
    seen["after larger"] = greedy(llm)
    seen["whole"] = send(llm)
    seen["after commit"] = greedy(llm)
    llm.rollback_weights()
    seen["after rollback"] = greedy(llm)
    with tempfile.TemporaryDirectory() as root:
        whole = mixed(Path(old), Path(new), MLP, Path(root) / "whole")
        reply = llm.update_weights_from_disk(str(whole))
        seen["mixture"] = reply["digest"], greedy(llm)
        llm.update_weights_from_disk(old)
        only = part(Path(new), MLP, Path(root) / "part")
        for turn in ("subset", "subset again"):
            reply = llm.update_weights_from_disk(only, subset=list(MLP))
            seen[turn] = reply["digest"], greedy(llm)
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    llm.collective_rpc("tests_rests")
    streams = outputs_during(
        lambda: [llm.update_weights_from_disk(f) for f in (new, old) * 3],
        llm,
        6,
        repeat(params),
    )
    seen["rests in flight"] = llm.collective_rpc("tests_rests")
    seen["lengths in flight"] = list({len(s.outputs[0].token_ids) for s in streams})
    seen["versions in flight"] = max(len(s.outputs[0].weight_versions) for s in streams)
    seen["own"] = own_writes(llm, old, new, greedy)
    llm.update_weights_from_disk(new)
    seen["scrubbed"] = [llm.verify_weights()]
    with tempfile.TemporaryDirectory() as root:
        go, done = Path(root) / "go", Path(root) / "done"
        llm.collective_rpc("tests_spoil", args=(str(go), str(done)))
        go.touch()
        until(done.exists)
    seen["scrubbed"].append(llm.verify_weights())
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


def own_writes(llm: Any, old: str, new: str, greedy: Any) -> dict[str, Any]:
    """What becomes of writes that an extension makes on both ranks."""
    from vllm.inflight.errors import InflightError

    def facts() -> Any:
        told = llm.weight_info()
        return [told[name] for name in ("weight_version", "digest", "weights")]

    def refused(act: Any) -> str:
        try:
            act()
        except InflightError as error:
            return error.code
        except Exception as error:  # vLLM's client has no better one
            return str(error)
        return ""

    seen: dict[str, Any] = {}
    llm.update_weights_from_disk(old, "old")
    llm.update_weights_from_disk(new, "new")
    seen["served"] = facts(), greedy(llm)
    seen["fails"] = refused(lambda: llm.collective_rpc("tests_start_and_fail_on_one"))
    seen["after failing"] = facts(), greedy(llm)
    llm.collective_rpc("tests_reload", args=(old,))
    seen["after writing"] = facts(), greedy(llm)
    seen["way back"] = refused(llm.rollback_weights)
    breaks_off = refused(
        lambda: llm.collective_rpc("tests_reload_and_fail_on_one", args=(new,))
    )
    seen["breaks off"] = breaks_off
    seen["after breaking off"] = facts()
    seen["is read"] = refused(lambda: llm.collective_rpc("compute_weight_checksums"))
    llm.collective_rpc("tests_reload", args=(new,))
    seen["after a second try"] = facts(), greedy(llm)
    return seen


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(sys.argv[1], sys.argv[2])
