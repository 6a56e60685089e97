"""TRL's own client on a server of ours: what it asked is written to trl.json.

It runs where TRL is installed beside this package, unmodified, and without vLLM's
development mode. TRL sends over NCCL and refuses a CPU; the two functions of vLLM's
that it sends through are replaced by gloo's (gloo_endpoint.py), and its device is
called "cuda". Everything else is TRL's.

Usage: python -m tests.support.client_records.record_trl FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM

from tests.support.client_records.gloo_endpoint import open_endpoint, send_packed
from tests.support.models.tiny import make_checkpoint
from tests.support.ports import free_port
from tests.support.serving import Server

RECORD = Path(__file__).with_name("trl.json")
BACKEND = ("--weight-transfer-config", '{"backend": "inflight_gloo"}')
PROMPTS = [[(7 * i + j) % 250 for i in range(20)] for j in range(3)]
CHAT = [[{"role": "user", "content": "Weights?"}]]


def recorded(asked: list[dict[str, Any]]) -> Any:
    """`requests.Session.send`, which writes down what goes out and comes back."""
    send = requests.Session.send

    def wrapper(self: Any, request: Any, **options: Any) -> Any:
        entry: dict[str, Any] = {"method": request.method, "path": request.path_url}
        if request.body:
            entry["json"] = json.loads(request.body)
        asked.append(entry)
        reply = send(self, request, **options)
        entry["status"] = reply.status_code
        return reply

    return wrapper


def main(folder: Path) -> None:
    import trl
    from trl.generation import vllm_client

    asked: list[dict[str, Any]] = []
    requests.Session.send = recorded(asked)  # type: ignore[method-assign]
    vllm_client.open_trainer_endpoint = open_endpoint
    vllm_client.packed_nccl_broadcast_producer = send_packed
    vllm_client.get_ip = lambda: "127.0.0.1"
    old, new = (make_checkpoint(folder / name, seed) for seed, name in enumerate("ab"))
    models = [
        AutoModelForCausalLM.from_pretrained(f, dtype="bfloat16") for f in (old, new)
    ]
    port = free_port()
    with Server(old, *BACKEND) as server:
        client = vllm_client.VLLMClient(base_url=server.url, group_port=port)

        def generate() -> Any:
            return client.generate(PROMPTS, temperature=0.0)["completion_ids"]

        before = generate()
        client.init_communicator(device=torch.device("cuda"))
        client.update_model_params(models[1])
        client.reset_prefix_cache()
        after = generate()
        with client.weight_update():
            for name, param in models[0].named_parameters():
                client.update_named_param(name, param.data)
        back = generate()
        client.chat(CHAT, temperature=0.0, max_tokens=8)
        assert before == back != after, "the weights did not follow"
    record = {"client": f"trl {trl.__version__}", "port": port, "requests": asked}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(asked)} requests; output changed and came back")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
