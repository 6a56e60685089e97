"""Models that embed: a decoder without its head, and an encoder without KV."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import PoolingParams
from vllm.config import PoolerConfig

from tests.support.engines.probe import prompts
from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.cli.finding import State
from vllm.inflight.cli.server_check import check_server
from vllm.inflight.errors import StagingUnavailable, WeightsMismatch

pytestmark = pytest.mark.engine

POOLING = {"runner": "pooling", "max_model_len": 512}


def embedded(llm: Any) -> list[list[float]]:
    """What becomes of six prompts."""
    outputs = llm.embed(prompts(6), use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize(
    "family",
    ["qwen2", pytest.param("bert", marks=pytest.mark.before("0.32.0"))],
)
def test_embeddings_equal_a_fresh_engines_after_every_commit_and_rollback(
    start: Callable[..., Any], checkpoint: Callable[..., Path], family: str
) -> None:
    old, new = (checkpoint(seed, family=family) for seed in (0, 1))
    fresh = embedded(start(new, **POOLING))
    llm = start(old, **POOLING)
    before = embedded(llm)
    assert before != fresh
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        assert embedded(llm) == fresh
        llm.rollback_weights()
        assert embedded(llm) == before


@pytest.mark.since("0.32.0")  # before, it hands tensors on, and updates work
def test_an_encoder_whose_loader_collects_all_tensors_first_embeds_and_rejects_updates(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    old, new = (checkpoint(seed, family="bert") for seed in (0, 1))
    llm = start(old, **POOLING)
    before = embedded(llm)
    with pytest.raises(WeightsMismatch, match="no parameter is filled by"):
        llm.update_weights_from_disk(str(new), "new")
    assert embedded(llm) == before


def with_dense(folder: Path, seed: int, into: Path) -> Path:
    """The checkpoint in `folder`, followed by a random Dense layer."""
    shutil.copytree(folder, into)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"{MODELS}.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (into / "modules.json").write_text(json.dumps(modules))
    (into / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 128, "pooling_mode_lasttoken": True}
    (into / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    dense = into / "2_Dense"
    dense.mkdir()
    config = {"in_features": 128, "out_features": 32, "bias": False}
    activation = {"activation_function": "torch.nn.modules.linear.Identity"}
    (dense / "config.json").write_text(json.dumps(config | activation))
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(seed))
    save_file({"linear.weight": weight}, dense / "model.safetensors")
    return into


MODELS = "sentence_transformers.models"


def test_an_embedder_whose_last_layer_no_update_would_fill_is_served_and_not_updated(
    start: Callable[..., Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """That layer is in a plain dictionary of vLLM's pooler."""
    old, new = (
        with_dense(checkpoint(seed, family="qwen2"), seed, tmp_path / str(seed))
        for seed in (0, 1)
    )
    llm = start(old, **POOLING)
    before = embedded(llm)
    assert len(before[0]) == 32
    with pytest.raises(StagingUnavailable) as refusal:
        llm.update_weights_from_disk(str(new), "new")
    assert "layer pooler (DispatchPooler)" in refusal.value.message
    assert "poolers_by_task[token_embed].head.projector" in refusal.value.message
    assert embedded(llm) == before


def test_a_token_is_embedded_once_though_a_retraction_came_into_its_prompt(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    options = POOLING | {
        "pooler_config": PoolerConfig(task="token_embed"),
        "max_num_batched_tokens": 32,
        "enable_chunked_prefill": True,
    }
    old, new = (checkpoint(seed, family="qwen2") for seed in (0, 1))
    long = {"prompt_token_ids": [(7 * i) % 250 for i in range(100)]}
    (fresh,) = start(new, **options).encode(
        [long], pooling_task="token_embed", use_tqdm=False
    )
    llm = start(old, **options)
    engine = llm.llm_engine
    engine.add_request("r", long, PoolingParams(task="token_embed"))
    assert engine.step() == []
    llm.update_weights_from_disk(str(new), "new", mode="retract")
    while not (outputs := engine.step()):
        pass
    data = outputs[0].outputs.data
    assert len(data) == 100
    assert torch.equal(data, fresh.outputs.data)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_request_that_embeds_can_be_aborted(
    start: Callable[..., Any], checkpoint: Callable[..., Path], is_running: bool
) -> None:
    options = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}
    llm = start(checkpoint(0, family="qwen2"), **POOLING, **options)
    before = embedded(llm)
    engine, long = llm.llm_engine, {"prompt_token_ids": list(range(100))}
    engine.add_request("r", long, PoolingParams(task="embed"))
    if is_running:
        assert engine.step() == []
    assert llm.pause_generation(mode="abort")["num_aborted"] == 1
    (output,) = engine.step()
    assert output.finished
    assert output.error.code == "aborted"
    assert not engine.has_unfinished_requests()
    llm.continue_generation()
    assert embedded(llm) == before


OF_POOLING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {},
    "/pooling": {"task": "embed"},
    "/v1/score": {"queries": "hello", "documents": ["you", "and me"]},
    "/v1/rerank": {"query": "hello", "documents": ["you", "and me"]},
}
"""Routes of a model that pools, and their bodies beside its `input`."""


def headers(server: Server, body: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Route → version and epoch of its reply, by the headers."""
    found = {}
    for path, more in OF_POOLING.items():
        own = {"model": "tiny"} if "documents" in more else body
        reply = server.client.post(path, json=own | more)
        assert reply.status_code == 200, reply.text
        names = "X-Weight-Version", "X-Weight-Epoch"
        version, epoch = (reply.headers[name] for name in names)
        found[path] = version, epoch
    return found


def test_a_server_that_embeds_is_updated_and_paused_over_http(
    start: Callable[..., Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old, new = (checkpoint(seed, family="qwen2") for seed in (0, 1))
    (prompt, *_) = prompts(6)
    (output,) = start(new, **POOLING).embed([prompt], use_tqdm=False)
    note = tmp_path / "served.json"
    flags = (
        *("--runner", "pooling", "--max-model-len", "512"),
        *("--inflight-journal", str(note)),
    )
    body = {"model": "tiny", "input": prompt["prompt_token_ids"]}
    update = {"path": str(new), "weight_version": "new"}
    with Server(old, *flags, "--inflight-when-paused", "reject") as server:
        (before,) = server.post("/v1/embeddings", body)["data"]
        assert server.client.get("/weight_info").json()["epoch"] == 0
        assert headers(server, body) == dict.fromkeys(OF_POOLING, ("default", "0"))
        assert server.post("/update_weights_from_disk", update)["success"]
        (after,) = server.post("/v1/embeddings", body)["data"]
        # From 0.33 on, a reply has the digits that tell one float32 from another.
        sent, computed = after["embedding"], output.outputs.embedding
        assert torch.tensor(sent).equal(torch.tensor(computed))
        assert headers(server, body) == dict.fromkeys(OF_POOLING, ("new", "1"))
        findings = check_server(server.url, None, 0.1)
        assert {finding.state for finding in findings} == {State.GOOD}
        server.post("/rollback_weights")
        assert server.post("/v1/embeddings", body)["data"] == [before]
        assert before["embedding"] != after["embedding"]
        server.post("/pause_generation", {"mode": "in_place", "lease_s": 60})
        refused = server.client.post("/v1/embeddings", json=body)
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        server.post("/continue_generation")
        epoch = server.post("/update_weights_from_disk", update)["epoch"]
        # The journal is written beside decoding, and a server may end before that.
        until(lambda: f'"epoch":{epoch},' in note.read_text())
    with Server(old, *flags) as server:
        assert server.client.get("/weight_info").json()["weight_version"] == "new"
        assert server.post("/v1/embeddings", body)["data"] == [after]
        server.post("/pause_generation", {"mode": "in_place"})
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(server.client.post, "/v1/embeddings", json=body)
            again = {"mode": "in_place"}
            until(lambda: server.post("/pause_generation", again)["num_waiting"])
            assert server.post("/pause_generation", {})["num_aborted"] == 1
        assert asked.result().status_code == 503
        server.post("/continue_generation")
        assert server.client.get("/health").status_code == 200
        assert server.post("/v1/embeddings", body)["data"] == [after]
