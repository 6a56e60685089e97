"""Doors in front of two tensor-parallel ranks, run as a script: prints JSON.

Usage: python -m tests.support.engines.two_ranks_routes OLD NEW
"""

import asyncio
import base64
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from tests.support.engines.probe import prompts
from tests.support.engines.script import tell
from tests.support.engines.torch_trainer import facts, training
from tests.support.models.family import HEAD_DIM
from tests.support.route_stub import caller, served
from vllm.inflight import ops

NAMES = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
)


class Client:
    """The routes' way to the engine core of an `LLM`."""

    def __init__(self, llm: Any) -> None:
        self.engine_core = self.renderer = self
        self.core_engines = [b"0"]
        self.core = llm.llm_engine.engine_core
        self.vllm_config = llm.llm_engine.vllm_config

    async def call_utility_all_async(self, *call: Any) -> list[Any]:
        return [await asyncio.to_thread(self.core.call_utility, *call)]

    def ensure_alive(self) -> None:
        self.core.ensure_alive()


def shards(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """What rank `rank` of two has to serve, cut from the checkpoint here."""
    whole = load_file(folder / "model.safetensors")

    def rows(name: str) -> torch.Tensor:
        return whole[name].chunk(2, dim=0)[rank]

    def vocabulary(name: str) -> torch.Tensor:
        padding = -len(whole[name]) % 64
        return torch.nn.functional.pad(whole[name], (0, 0, 0, padding)).chunk(2)[rank]

    found = {n: vocabulary(n) for n in NAMES[:2]} | {NAMES[2]: whole[NAMES[2]]}
    for layer in range(2):
        at = f"model.layers.{layer}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        found[f"{attention}.qkv_proj.weight"] = torch.cat(
            [rows(f"{attention}.{x}_proj.weight") for x in "qkv"]
        )
        found[f"{mlp}.gate_up_proj.weight"] = torch.cat(
            [rows(f"{mlp}.{x}_proj.weight") for x in ("gate", "up")]
        )
        for name in (f"{attention}.o_proj.weight", f"{mlp}.down_proj.weight"):
            found[name] = whole[name].chunk(2, dim=1)[rank]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{norm}.weight"] = whole[f"{at}.{norm}.weight"]
        for norm in ("q_norm", "k_norm"):
            found[f"{attention}.{norm}.weight"] = whole[f"{attention}.{norm}.weight"]
            assert len(found[f"{attention}.{norm}.weight"]) == HEAD_DIM
    return found


def odd(
    payload: list[dict[str, Any]], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """The parameters of any rank that are not the reference's, served in `dtype`.

    The ranks are those of one engine of two ranks, or of several, one after the other.
    """
    names = []
    for rank, told in enumerate(payload):
        assert told["parallelism_info"]["tp_rank"] == rank % 2
        reference = {
            name: ops.digest([tensor.to(dtype)])[0].hex()
            for name, tensor in shards(folder, rank % 2).items()
        }
        found = told["checksums"]
        names += [
            f"rank {rank} {name}"
            for name in reference.keys() | found.keys()
            if reference.get(name) != found.get(name)
        ]
    return sorted(names)


def entry(named: dict[str, torch.Tensor]) -> str:
    return base64.b64encode(save(named)).decode()


def piece(folder: Path) -> Path:
    """A folder with one tensor of a checkpoint, beside it."""
    at = folder.with_name(f"{folder.name}-piece")
    at.mkdir()
    name = NAMES[2]
    tensors = {name: load_file(folder / "model.safetensors")[name]}
    save_file(tensors, at / "model.safetensors")
    return at


def main(old: Path, new: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(old),
        tensor_parallel_size=2,
        max_model_len=512,
        block_size=32,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=True,
        additional_config={"inflight": {"update_deadline_s": 60.0}},
    )
    door = caller(served(Client(llm)))

    def post(path: str, **body: Any) -> Any:
        return door.post(path, json=body).json()

    def greedy() -> Any:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate(prompts(8), params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def checked(folder: Path) -> list[str]:
        return odd(post("/weights_checker")["ranks"], folder)

    def read(folder: Path) -> list[str]:
        whole = load_file(folder / "model.safetensors")
        return [
            name
            for name in NAMES
            if post("/get_weights_by_name", name=name, truncate_size=200)
            != whole[name][:200].float().tolist()
        ]

    whole = load_file(new / "model.safetensors")
    wrong = whole | {NAMES[2]: whole[NAMES[2]] + 1}
    seen: dict[str, Any] = {"before": greedy(), "odd at start": checked(old)}
    seen["misread at start"] = read(old)
    seen["odd against another"] = len(checked(new))
    tensors = "/update_weights_from_tensor"
    reply = post(tensors, serialized_named_tensors=[entry(whole), entry(wrong)])
    seen["ranks that differ"] = reply["error"]["code"]
    seen["after ranks that differ"] = greedy()
    seen["odd after that"] = checked(old)
    reply = post(tensors, serialized_named_tensors=[entry(whole)] * 2)
    seen["one entry each"] = reply["success"]
    seen["expected"] = greedy()
    seen["odd after commit"] = checked(new)
    seen["misread after commit"] = read(new)
    post("/rollback_weights")
    seen["odd after rollback"] = checked(old)
    for name, tensor in whole.items():
        reply = post(tensors, serialized_named_tensors=[entry({name: tensor})])
    seen["one tensor a call"] = reply["message"]
    post("/rollback_weights")
    with training(world_size=3) as trainer:
        post("/init_weights_update_group", **trainer.group)
        names = facts(new)["names"]
        for part in (names[:10], names[10:]):
            trainer.begin(new, part)
            reply = post("/update_weights_from_distributed", **facts(new, part))
        seen["broadcast"] = reply["message"]
    seen["after broadcast"] = greedy()
    seen["odd after broadcast"] = checked(new)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(old)})
    llm.update_weights_from_disk(str(piece(old)), subset=[NAMES[2]])
    seen["odd after reload"] = checked(old)
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": "/nowhere"})
    except Exception as error:
        seen["reload of nothing"] = str(error)
    seen["odd after that reload"] = checked(old)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(Path(sys.argv[1]), Path(sys.argv[2]))
