"""An engine of two ranks, each of which copies into its own parameters.

A worker keeps clones of its parameters under the new weights. prime-rl's call later
copies them into the parameters of the model that it is given. Prints what happened as
JSON.

Usage: python -m tests.support.frameworks.direct_ranks OLD NEW PARALLEL
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tests.support.engines import unpacked
from tests.support.engines.probe import prompts
from tests.support.engines.script import OPTIONS, tell
from tests.support.engines.transport import Extension

if not torch.cuda.is_available():
    unpacked.unpack()

NORM = "norm.weight"


class Direct:
    """prime-rl's call, in the ways that a folder's name says."""

    def tests_make_room(self: Any) -> None:
        Extension.tests_make_room(self)

    def tests_keep(self: Any) -> None:
        params = self.model_runner.model.named_parameters()
        self.tests_kept = {name: p.detach().clone() for name, p in params}

    def update_weights_from_path(self: Any, weight_dir: str) -> None:
        """`other`: the last rank has another number; `half`: it lacks a norm."""
        is_last = self.rank == 1
        for name, param in self.model_runner.model.named_parameters():
            tensor = self.tests_kept[name]
            if is_last and name.endswith(NORM):
                if weight_dir == "half":
                    continue
                if weight_dir == "other":
                    tensor = tensor * 2
            with torch.no_grad():
                param.data.copy_(tensor)


def main(old: str, new: str, parallel: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        old,
        **{f"{parallel}_parallel_size": 2},
        worker_extension_cls=f"{__spec__.name}.{Direct.__name__}",
        **OPTIONS,
    )

    def served() -> Any:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate(prompts(8), params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        info = llm.weight_info()
        return info["weight_version"], info["digest"], tokens

    if parallel == "pipeline" and not torch.cuda.is_available():
        llm.collective_rpc("tests_make_room")
    seen: dict[str, Any] = {}
    llm.update_weights_from_disk(new, "new")
    seen["new"] = served()
    llm.collective_rpc("tests_keep")
    llm.update_weights_from_disk(old, "old")
    seen["old"] = served()
    for name in ("step_1", "half", "step_2", "other"):
        error = None
        try:
            llm.collective_rpc("update_weights_from_path", args=(name,))
        except Exception as failure:
            error = str(failure)
        seen[name] = error, *served()
    llm.rollback_weights()
    seen["rolled back"] = served()
    seen["scrub"] = llm.verify_weights()["result"]
    tell(seen)


if __name__ == "__main__":
    if torch.cuda.is_available():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    main(*sys.argv[1:])
