"""The trainer's side on real engines: what was published is what is served."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.deltas import stepped
from tests.support.engines.mixtures import MLP, declared
from tests.support.engines.probe import outputs_during
from tests.support.engines.script import RESULT
from tests.support.engines.sent_tensors import entry, halves
from tests.support.serving import Server
from vllm.inflight.errors import (
    Forbidden,
    NoTransport,
    UpdateBusy,
    VersionConflict,
    WeightsMismatch,
)
from vllm.inflight.trainer import Publisher, bodies

pytestmark = pytest.mark.engine

PROMPT = list(range(40, 90))
NUM_TOKENS = 24
KEY = "secret"
LOCAL = '{"backend": "local"}'


def greedy(llm: Any) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def greedy_over_http(server: Server, **more: Any) -> list[int]:
    body = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True}
    body |= {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return server.post("/v1/completions", body | more)["choices"][0]["token_ids"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def old(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(0, tied=True)


@pytest.fixture(scope="module")
def new(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(1, tied=True)


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], new: Path) -> list[int]:
    """What an engine started on the new weights says; it has no transfer backend."""
    llm = start(new)
    with (
        Publisher(llm, weights(new)) as to,
        pytest.raises(NoTransport, match="LLM: ") as refused,
    ):
        to.publish()
    assert LOCAL in "".join(refused.value.__notes__)
    return greedy(llm)


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    return start(old, weight_transfer_config=WeightTransferConfig(backend="local"))


def test_an_llm_serves_what_a_trainer_of_its_process_publishes(llm, old, new, fresh):
    assert greedy(llm) != fresh
    # A model of transformers, whose head is tied to its embedding.
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16)
    with Publisher(llm, model) as to:
        outcome = to.publish("step-7", step=7)
        assert greedy(llm) == fresh
        info = llm.weight_info()
        assert (info["weight_version"], info["step"]) == ("step-7", 7)
        assert outcome.epoch == info["epoch"]
        assert outcome.digest == info["digest"]
        # The optimiser's step, on the same module.
        model.load_state_dict(
            AutoModelForCausalLM.from_pretrained(old, dtype=torch.bfloat16).state_dict()
        )
        to.publish("step-8")
    assert greedy(llm) != fresh


def test_a_subset_is_published_on_top_of_what_is_served(llm, old, new):
    mixture = weights(old) | declared(new, MLP)
    with Publisher(llm, lambda: mixture) as to:
        whole = to.publish()
        expected = greedy(llm)
        mixture = weights(old)
        to.publish("base")
        mixture = declared(new, MLP) | {"model.norm.weight": torch.zeros(1)}
        outcome = to.publish(subset=MLP, base_version="base")
        assert (outcome.digest, greedy(llm)) == (whole.digest, expected)
        with pytest.raises(VersionConflict, match="base_version"):
            to.publish(subset=MLP, base_version="base")


def test_master_weights_in_float32_are_served_in_the_engines_dtype(llm, new, fresh):
    master = {name: tensor.float() for name, tensor in weights(new).items()}
    with Publisher(llm, master, wire="shm") as to:
        to.publish("master")
    assert greedy(llm) == fresh


def test_a_publish_commits_between_the_steps_of_generate(llm, old, new):
    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    with Publisher(llm, weights(new)) as to:

        def train() -> None:
            for _ in range(5):
                to.publish()

        outputs = outputs_during(train, llm, 1, repeat(params))
    assert {len(o.outputs[0].token_ids) for o in outputs} == {600}
    assert any(len(o.outputs[0].weight_versions) > 1 for o in outputs)


def test_a_wrong_name_is_answered_by_the_nearest_one_and_changes_nothing(llm, new):
    before = greedy(llm), llm.get_weight_version()
    wrong = {"model.layers.1.mlp.up_proj.weight": "layers.1.mlp.up_proj.weight"}
    nearest = r"nearest: model\.layers\.1\.mlp\.up_proj\.weight"
    with Publisher(llm, weights(new), name_map=wrong) as to:
        with pytest.raises(WeightsMismatch, match=nearest) as refused:
            to.publish("wrong")
        assert refused.value.tensors[0] == "layers.1.mlp.up_proj.weight"
    assert (greedy(llm), llm.get_weight_version()) == before
    with Publisher(llm, weights(new)) as to:
        assert to.publish("right").version == "right"


def test_name_map_auto_finds_and_reports_the_names_of_a_wrapper(llm, new, fresh):
    wrapped = {f"module.{name}": tensor for name, tensor in weights(new).items()}
    with Publisher(llm, wrapped, name_map="auto") as to:
        outcome = to.publish("auto")
    assert outcome.mapped == {f"module.{name}": name for name in weights(new)}
    assert greedy(llm) == fresh


def test_a_script_that_closes_nothing_ends_well_and_its_last_version_was_served(new):
    """Its engine is in the same process, and ends with it."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.support.engines.left_open",
        str(new),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = (x for x in done.stdout.splitlines() if x.startswith(RESULT))
    assert json.loads(told.removeprefix(RESULT))["last"]["weight_version"] == "last"


# ------------------------------------------------------------------- over HTTP
@pytest.fixture(scope="module")
def server(old: Path, fresh: Any) -> Iterator[Server]:
    with Server(old, "--weight-transfer-config", LOCAL, key=KEY) as running:
        yield running


def test_a_server_serves_what_a_trainer_publishes_over_http(
    server, new, fresh, tmp_path
):
    assert greedy_over_http(server) != fresh
    told: list[str] = []
    disk = {"wire": "disk", "directory": tmp_path}
    for wire in ({"wire": "shm"}, disk, {"wire": "http"}):
        with Publisher(
            server.url,
            lambda: iter(weights(new).items()),
            api_key=KEY,
            progress=lambda phase, done, total: told.append(phase),
            **wire,
        ) as to:
            outcome = to.publish("step-7", step=7)
        assert greedy_over_http(server) == fresh
        info = server.client.get("/weight_info").json()
        assert (info["step"], info["epoch"]) == (7, outcome.epoch)
        assert set(told) == {"snapshot", "transfer", "commit"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", [None, 3], ids=["plain", "zstd"])
def test_a_delta_reaches_a_server_in_the_body_of_a_request(
    server, old, new, monkeypatch, level
):
    monkeypatch.setattr(bodies, "BODY_BYTES", 1 << 16)  # several for a whole version
    source = weights(old)
    options = {"api_key": KEY, "wire": "http", "delta_compression": level}
    with Publisher(server.url, source, **options) as to:
        assert not to.publish("whole").is_delta
        for seed in range(3):
            source |= stepped(source, seed)
            outcome = to.publish(f"delta-{seed}")
            assert outcome.is_delta
            found = greedy_over_http(server)
            with Publisher(server.url, source, api_key=KEY, delta="off") as other:
                assert other.publish("the same").digest == outcome.digest
            assert greedy_over_http(server) == found
        # Another version is served meanwhile.
        with Publisher(server.url, weights(new), api_key=KEY) as other:
            other.publish("another")
        source |= stepped(source, 3)
        assert not to.publish("whole again").is_delta
        source |= stepped(source, 4)
        assert to.publish("delta again").is_delta
        # It has missed that update.
        server.post("/rollback_weights")
        source |= stepped(source, 5)
        outcome = to.publish("what two updates have changed")
        assert outcome.is_delta
        with Publisher(server.url, source, api_key=KEY, delta="off") as other:
            assert other.publish("the same").digest == outcome.digest


def test_a_body_may_be_a_chunk_of_an_update_under_way(server, old, new, fresh):
    with Publisher(server.url, weights(old), api_key=KEY) as to:
        to.publish("before")
    update = {"update_id": "in bodies"}
    server.post("/start_weight_update", update | {"weight_version": "chunks"})
    for chunk, half in enumerate(halves(weights(new))):
        body = {"chunk": chunk, "serialized_named_tensors": [entry(half)]}
        for _ in range(2):  # as if a reply was lost
            server.post("/update_weights_from_tensor", update | body)
    assert server.client.get("/weight_info").json()["weight_version"] == "before"
    server.post("/finish_weight_update", update)
    assert greedy_over_http(server) == fresh
    late = server.client.post(
        "/update_weights_from_tensor", json=update | body | {"chunk": 2}
    )
    assert (late.status_code, late.json()["error"]["code"]) == (409, "wrong_phase")


def test_tokens_flow_while_a_trainer_publishes_over_http(server, old, new):
    spans: list[list[dict[str, Any]]] = []
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    with Publisher(server.url, weights(old), api_key=KEY) as to:
        futures = [to.publish(block=False)]
        while len(futures) < 6 or not all(future.done() for future in futures):
            reply = server.post("/v1/completions", body)
            spans.append(reply["choices"][0]["weight_versions"])
            if len(futures) < 6:
                futures.append(to.publish(block=False))
        labels = [future.result().version for future in futures]
    inside = {span["version"] for choice in spans for span in choice[1:]}
    assert inside <= set(labels)
    assert inside, "no update was committed while tokens flowed"
    assert all(choice[-1]["end"] == 400 for choice in spans)


def test_an_error_over_http_keeps_the_type_and_text_that_the_engine_gave(
    server, new, fresh
):
    with Publisher(server.url, weights(new), api_key=KEY) as to:
        to.publish("good")
    wrong = {"model.norm.weight": "model.final_norm.weight"}
    with (
        Publisher(server.url, weights(new), api_key=KEY, name_map=wrong) as to,
        pytest.raises(WeightsMismatch, match=r"nearest: .*norm\.weight") as refused,
    ):
        to.publish("bad")
    assert server.url in str(refused.value)
    assert greedy_over_http(server) == fresh
    stranger = Publisher(server.url, weights(new), api_key="wrong")
    with stranger as to, pytest.raises(Forbidden):
        to.publish()


def test_a_busy_server_is_skipped_or_waited_for(server, new):
    server.post("/start_weight_update", {"update_id": "elsewhere"})
    try:
        with Publisher(server.url, weights(new), api_key=KEY, on_busy="skip") as to:
            assert to.publish().skipped
        hasty = Publisher(server.url, weights(new), api_key=KEY, timeout_s=4)
        with hasty as to, pytest.raises(UpdateBusy, match="elsewhere"):
            to.publish()
        with Publisher(server.url, weights(new), api_key=KEY) as to:
            future = to.publish("after", block=False)
            server.post("/abort_weight_update", {"update_id": "elsewhere"})
            assert future.result().version == "after"
    finally:
        server.post("/abort_weight_update", {"update_id": "elsewhere"})


def test_two_publishers_at_once_leave_an_engine_with_one_whole_version(
    server, old, new, fresh
):
    """Two trainers wait for each other, and the last one's weights are served."""
    with (
        Publisher(server.url, weights(old), api_key=KEY) as first,
        Publisher(server.url, weights(new), api_key=KEY) as second,
    ):
        futures = [to.publish(block=False) for to in (first, second) for _ in range(2)]
        epochs = sorted(future.result().epoch for future in futures)
        assert epochs == list(range(epochs[0], epochs[0] + 4))
        second.publish("last")
    assert greedy_over_http(server) == fresh
