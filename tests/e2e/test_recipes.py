"""The recipes of docs/rl.md that put version spans to use in a framework."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.frameworks.packages import PACKAGES
from tests.support.engines import gentle
from tests.support.engines.script import run_script
from tests.support.frameworks.recipes import (
    LENGTH,
    PRIME_RL,
    PROMPT,
    TRL,
    VERL,
    VERL_SERVER,
    names,
    training_sample,
)
from tests.support.frameworks.recipes import stand_in as module
from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

SPANS = [
    {"version": "default", "epoch": 0, "start": 0, "end": 1},
    {"version": "step-4", "epoch": 4, "start": 1, "end": 3},
    {"version": "step_5", "epoch": 5, "start": 3, "end": 4},
]


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> list[Path]:
    return [checkpoint(seed) for seed in range(2)]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Server]:
    flags = ("--weight-transfer-config", json.dumps({"backend": "local"}))
    flags += ("--logits-processors", gentle.NAME)
    with Server(folders[0], *flags) as running:
        yield running


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["stand-in", "own"],
)
def is_own(request: pytest.FixtureRequest) -> bool:
    """Whether a recipe meets the framework's own file, of `make test-frameworks`."""
    assert not request.param or PACKAGES.is_dir(), "run `make test-frameworks`"
    return bool(request.param)


def publish_during(server: Server, folder: Path, label: str) -> threading.Thread:
    """Stage a version, and commit it in a pause as soon as a request decodes."""
    # Staged before, and paused: on a busy machine the requests might end sooner.
    server.post("/start_weight_update")
    server.post("/update_weights", {"update_info": {"path": str(folder)}})

    def publish() -> None:
        def used() -> int:
            (found,) = server.client.get("/v1/loads").json()["loads"]
            return int(found["num_used_tokens"])

        until(lambda: used() > 32)
        server.post("/pause_generation", {"mode": "in_place"})
        body = {"weight_version": label}
        assert server.post("/finish_weight_update", body)["epoch"]
        server.post("/continue_generation")

    thread = threading.Thread(target=publish)
    thread.start()
    return thread


def test_ages_count_versions_and_ratios_drop_what_is_too_old() -> None:
    made = names()
    assert made["ages"](SPANS, 4, 5) == [5, 1, 1, 0]
    assert made["ages"](None, 2, 5) == [5, 5]  # no version is known
    found = made["ratios"]([-1.0] * 4, [-1.0, -1.5, -3.0, -1.1], SPANS, 5)
    expected = [0.0, math.exp(0.5), 2.0, math.exp(0.1)]
    assert found == pytest.approx(expected)


def test_trls_rollout_function_masks_what_is_too_old(
    server: Server, folders: list[Path], is_own: bool
) -> None:
    arguments = SimpleNamespace(
        vllm_server_base_url=server.url, max_completion_length=LENGTH
    )
    trainer = SimpleNamespace(args=arguments, num_generations=2)
    prompts = ["hello", "hello", "you", "you"]
    if is_own:
        told = run_script("trl", "sampled", room="tests.support.frameworks")
        assert told["prompts"] == prompts
    thread = publish_during(server, folders[1], "update-1")
    result = names(TRL)["rollout_func"](prompts, trainer, oldest=0)
    thread.join()
    assert result.keys() == {"prompt_ids", "completion_ids", "logprobs", "env_mask"}
    tokens = result["completion_ids"]
    assert [len(each) for each in result["prompt_ids"]] == [5, 5, 3, 3]
    for name in ("logprobs", "env_mask"):
        assert [len(each) for each in result[name]] == [len(each) for each in tokens]
    for mask in result["env_mask"]:
        # Masked up to the commit, unless the completion had ended before it.
        assert mask == sorted(mask) and set(mask) <= {0, 1}
    assert any(set(mask) == {0, 1} for mask in result["env_mask"])


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_sample_of_prime_rl_leaves_out_what_is_too_old(
    server: Server, folders: list[Path], route: str, is_own: bool
) -> None:
    publish = {"path": str(folders[0]), "weight_version": "step_6"}
    assert server.post("/update_weights_from_disk", publish)["success"]
    body = {"model": "tiny", "max_tokens": LENGTH, "ignore_eos": True}
    body |= {"return_token_ids": True}
    body |= (
        {"prompt": PROMPT}
        if route == "completions"
        else {"messages": [{"role": "user", "content": "hello"}]}
    )
    thread = publish_during(server, folders[1], "step_7")
    (choice,) = server.post(f"/v1/{route}", body)["choices"]
    thread.join()
    border = choice["weight_versions"][0]["end"]
    # An answer of a tool follows, and an earlier branch has the first token.
    context, tokens, tool = [7, 8, 9], choice["token_ids"], [5, 6]
    mask = [False] * 4 + [True] * (LENGTH - 1) + [False] * 2
    sample = training_sample(is_own)(
        token_ids=context + tokens + tool,
        mask=list(mask),
        logprobs=[0.0] * len(mask),
        temperatures=[1.0] * len(mask),
        env_name="tool",
    )
    mask_old = names(PRIME_RL)["mask_old"]
    kept = mask_old(sample, len(context), choice, step=7, oldest=1)
    assert kept.mask == mask
    kept = mask_old(sample, len(context), choice, step=7, oldest=0)
    assert kept.mask == [False] * (3 + border) + mask[3 + border :]


def test_verls_batch_gets_weights_and_a_mask(is_own: bool) -> None:
    if is_own:  # verl reads what the recipe writes
        losses = PACKAGES / "verl" / "verl" / "workers" / "utils" / "losses.py"
        assert 'data.get("rollout_is_weights"' in losses.read_text()
    module(VERL_SERVER, vLLMHttpServer=object)
    batch = {
        "response_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]),
        "old_log_probs": torch.full((2, 5), -1.0),
        "rollout_log_probs": torch.full((2, 5), -1.5),
    }
    young = [{"version": "step-5", "epoch": 5, "start": 0, "end": 2}]
    names(VERL)["correct"](batch, [SPANS, young], newest=5)
    ratio = math.exp(0.5)
    weights = [[0, ratio, ratio, ratio, 0], [ratio, ratio, 0, 0, 0]]
    assert torch.allclose(batch["rollout_is_weights"], torch.tensor(weights))
    assert batch["response_mask"].tolist() == [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]


def test_engines_in_the_frameworks_process_keep_the_spans(
    folders: list[Path], is_own: bool
) -> None:
    source = "own" if is_own else "stand-in"
    told: dict[str, Any] = run_script(
        "recipes", source, *folders, room="tests.support.frameworks"
    )
    modules = told["openrlhf"]["is of"], told["verl"]["is of"]
    assert is_own == (modules == ("openrlhf.utils.agent", VERL_SERVER))
    ((start, end),) = told["openrlhf"]["ranges"]
    assert len(PROMPT) < start < end == told["openrlhf"]["tokens"]
    first, last = told["verl"]["weight_versions"]
    assert (first["version"], last["version"]) == ("old", "new")
    assert first["end"] == last["start"] and last["end"] == LENGTH
    assert not told["spans that are left"]
