"""`python -m tests.robustness.fuzz.requests --requests 20000`: a real server, and bad
requests.

Bodies that routes take, with something wrong in them, go to a server that decodes
meanwhile. Each has to be answered in JSON, by a success or a typed refusal that is not
the engine's fault; at the end the server updates and decodes as it did before.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.robustness.fuzz import mutation
from tests.robustness.fuzz.parsers import MANIFEST, PARTS, REQUEST, bucket
from tests.support.models.tiny import make_checkpoint
from tests.support.serving import Server
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES

KEY = "fuzz"
LEFT_OUT = {"/init_weights_update_group", "/init_actor_update_group"}
"""They wait for a trainer, for minutes; parsers.py has what they read."""
FAULTS = {None, "engine_fault", "inflight_error"}
"""Codes, or none, by which a server says that it did not expect this."""
PATIENCE_S = 60.0
ONE_EACH = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A refused request may be answered before it was read, and its connection closed."""


def bodies(folder: str) -> dict[str, dict[str, Any]]:
    """What a route takes; of those that are not here, an update's id."""
    disk = {"path": folder, "weight_version": "v", "flush_cache": False}
    start = {"update_id": "u", "weight_version": "v", "manifest": MANIFEST}
    return {
        "/pause": {"mode": "abort", "clear_cache": False},
        "/pause_generation": {"mode": "in_place", "lease_s": 0.1, "owner": "a"},
        "/resume": {"owner": "a"},
        "/continue_generation": {"torch_empty_cache": True},
        "/init_weight_transfer_engine": {"init_info": {}},
        "/start_weight_update": start | {"deadline_s": 1.0, "base_version": "v"},
        "/start_draft_weight_update": start,
        "/update_weights": {"update_info": {"path": folder}, "chunk": 0},
        "/finish_weight_update": {"weight_version": "v", "mode": "in_place"},
        "/rollback_weights": {"to_version": "v", "mode": "abort"},
        "/update_weights_from_disk": disk | {"subset": ["model.*"], "deadline_s": 2.0},
        "/update_weights_from_tensor": {
            "serialized_named_tensors": [bucket(PARTS).hex()],
            "load_format": "flattened_bucket",
        },
        "/update_weights_from_distributed": {
            "names": ["a"],
            "dtypes": ["float32"],
            "shapes": [[1]],
        },
        "/update_weight_version": {"new_version": "v", "abort_all_requests": False},
        "/receive_weight_update": REQUEST,
        "/generate": {
            "input_ids": [3, 4, 5],
            "rid": "r",
            "sampling_params": {
                **{"max_new_tokens": 2, "temperature": 0.5, "top_k": 3, "n": 2},
                **{"stop": ["a"], "stop_token_ids": [7], "min_new_tokens": 1},
                **{"sampling_seed": 1, "logit_bias": {"5": 1.0}, "regex": "a+"},
            },
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
            "stream": False,
        },
        "/v1/loads": {"dp_rank": 0},
        "/abort_request": {"rid": "r", "abort_all": False},
        "/abort_requests": {"request_ids": ["r"]},
        "/get_weights_by_name": {"name": "model.norm.weight", "truncate_size": 2},
        "/weights_checker": {"action": "checksum", "skip_tensor_list": ["a"]},
        "/weight_checker": {"action": "compare", "baseline": {"a": "0"}},
        "/release_memory_occupation": {"tags": ["weights"]},
        "/resume_memory_occupation": {"tags": ["kv_cache"]},
    }


def drawn(rng: random.Random, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One request: method, path, body, headers."""
    every = [*ROUTES, *ROLLOUT_ROUTES]
    method, path = rng.choice([route for route in every if route[1] not in LEFT_OUT])
    body = mutation.value(rng, known.get(path, {"update_id": "u"}))
    content = json.dumps(body).encode()
    if rng.random() < 0.1:
        content = mutation.octets(rng, content)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    if rng.random() < 0.05:
        headers["Authorization"] = rng.choice(["", "Bearer", "Bearer x", "Basic fuzz"])
    url = path.replace("{update_id}", rng.choice(["u", "%00", "..%2f", "a" * 999]))
    return {"method": method, "url": url, "content": content, "headers": headers}


def verdict(reply: httpx.Response) -> str | None:
    """What is wrong with an answer, if anything is."""
    if reply.is_redirect or "detail" in reply.text[:20]:
        return None  # a path that the router does not know
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        return None
    if reply.status_code == 200 and not reply.content:
        return None  # of /health_generate
    try:
        body = reply.json()
    except ValueError:
        return f"{reply.status_code} and no JSON"
    if reply.status_code < 400:
        return None
    code = body.get("error", {}).get("code") if isinstance(body, dict) else None
    return f"{reply.status_code} {code}" if code in FAULTS else None


def says(server: Server) -> Any:
    """What the server makes of a prompt."""
    text = {"model": "tiny", "prompt": list(range(3, 40)), "max_tokens": 16}
    reply = server.post("/v1/completions", text | {"temperature": 0})
    return reply["choices"][0]["text"]


def main() -> int:
    """Send them; 1 if a server of ours had no proper answer to one."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    rng = random.Random(asked.seed)
    codes: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        model = make_checkpoint(Path(root) / "model", 0)
        flags = (
            *("--weight-transfer-config", '{"backend": "local"}'),
            *("--inflight-allowed-paths", root, "--inflight-pause-lease-s", "1"),
        )
        with Server(model, *flags, key=KEY) as server:
            before, known = says(server), bodies(str(model))

            def send(request: dict[str, Any]) -> None:
                began = time.monotonic()
                try:
                    reply = client.request(**request)
                except httpx.HTTPError as error:
                    problem, code = type(error).__name__, "none"
                else:
                    problem, code = verdict(reply), str(reply.status_code)
                codes[code] += 1
                if problem is not None:
                    problem += f" {request['url']}"
                    if problem not in wrong:
                        print(f"{problem} after {time.monotonic() - began:.1f} s:")
                        print(f"  {request!r:.600}", flush=True)
                    wrong[problem] += 1

            with (
                httpx.Client(
                    base_url=server.url, timeout=PATIENCE_S, limits=ONE_EACH
                ) as client,
                ThreadPoolExecutor(4) as pool,
            ):
                list(pool.map(send, (drawn(rng, known) for _ in range(asked.requests))))
            server.post("/abort_weight_update")
            server.post("/continue_generation")
            reply = server.post("/update_weights_from_disk", {"path": str(model)})
            lives = reply.get("success") is True and says(server) == before
    print(f"{codes.total():,} requests, by status: {dict(sorted(codes.items()))}")
    print(f"{wrong.total()} without a proper answer: {dict(wrong)}")
    print(f"afterwards it updates and says what it said: {lives}")
    return bool(wrong) or not lives


if __name__ == "__main__":
    raise SystemExit(main())
