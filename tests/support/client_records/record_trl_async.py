"""The client of TRL's asynchronous trainers on a server of ours: see trl_async.json.

As record_trl.py does it for the synchronous client: TRL is unmodified, but for the two
functions of vLLM's that it sends through over NCCL.

Usage: python -m tests.support.client_records.record_trl_async FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import requests
from transformers import AutoModelForCausalLM

from tests.support.client_records.gloo_endpoint import open_endpoint, send_packed
from tests.support.client_records.record_trl import BACKEND, recorded
from tests.support.models.tiny import make_checkpoint
from tests.support.serving import Server

RECORD = Path(__file__).with_name("trl_async.json")
PROMPT = {"model": "tiny", "prompt": [(7 * i) % 250 for i in range(20)]}


def main(folder: Path) -> None:
    import trl
    from accelerate import PartialState
    from trl.experimental.async_grpo import vllm_client, weight_transfer

    PartialState(cpu=True)  # TRL's loggers ask for it
    asked: list[dict[str, Any]] = []
    requests.Session.send = recorded(asked)  # type: ignore[method-assign]
    weight_transfer.open_trainer_endpoint = open_endpoint
    weight_transfer.packed_nccl_broadcast_producer = send_packed
    weight_transfer.get_ip = lambda: "127.0.0.1"
    old, new = (make_checkpoint(folder / name, seed) for seed, name in enumerate("ab"))
    models = [
        AutoModelForCausalLM.from_pretrained(f, dtype="bfloat16") for f in (old, new)
    ]
    named = dict(models[0].named_parameters())
    info = {
        "names": list(named),
        "dtype_names": [str(p.dtype).removeprefix("torch.") for p in named.values()],
        "shapes": [list(p.shape) for p in named.values()],
    }
    with Server(old, *BACKEND) as server:

        def said() -> Any:
            body = PROMPT | {"temperature": 0, "return_token_ids": True}
            return server.post("/v1/completions", body)["choices"][0]["token_ids"]

        client = vllm_client.VLLMClient(server.url)
        client.get_max_model_len()
        transfer = weight_transfer.WeightTransferClient(client, info)
        before = said()
        transfer.init_weight_transfer()
        told = []
        for model in (models[1], models[0]):
            transfer.pause()
            transfer.send_weights(iter(model.named_parameters()))
            transfer.resume()
            told.append(said())
        after, back = told
        assert before == back != after, "the weights did not follow"
    record = {"client": f"trl {trl.__version__}", "requests": asked}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(asked)} requests; output changed and came back")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
