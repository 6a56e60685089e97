"""slime's own rollout functions, from its repository, against a real server."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import run_script
from tests.support.frameworks.slime import LONGEST
from tests.support.serving import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> list[Path]:
    # Some layers, so that a long rollout takes a while.
    return [checkpoint(seed, layers=4) for seed in range(2)]


@pytest.fixture(scope="module")
def seen(folders: list[Path]) -> dict[str, Any]:
    """What slime's samples have."""
    assert OWN["slime"].folder.is_dir(), "run `make test-frameworks`"
    with Server(folders[0]) as server:
        server.post("/update_weight_version", {"new_version": "old"})
        seen = run_script(
            "slime", server.url, *folders, room="tests.support.frameworks"
        )
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 24, "temperature": 0}
        body |= {"return_token_ids": True, "logprobs": 0}
        server.post(
            "/update_weights_from_disk",
            {"path": str(folders[0]), "weight_version": "old"},
        )
        seen["completion"] = server.post("/v1/completions", body)["choices"][0]
        return seen


def test_the_server_is_an_external_engine_of_slime(seen: dict[str, Any]) -> None:
    assert seen["engine"] == {
        "worker type": "regular",
        "GPUs": 1,
        "layout": {"tp_size": 1, "pp_size": 1, "ep_size": 1, "moe_dp_size": 1},
        "memory saver": False,
        "processed": True,
        "version": "old",
    }


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_a_sample_has_the_tokens_and_logprobs_of_the_completions_route(
    seen: dict[str, Any], way: str
) -> None:
    sample, choice = seen[way], seen["completion"]
    assert sample["tokens"][-sample["length"] :] == choice["token_ids"]
    assert sample["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"])
    assert (sample["status"], sample["versions"]) == ("truncated", ["old"])
    # Only the rollout keeps special tokens, and with them half a character at the end.
    text = re.sub(r"<\|\w+\|>", "", sample["response"])
    assert text.rstrip("\ufffd") == choice["text"].rstrip("\ufffd")


def test_an_aborted_rollout_goes_on_with_the_new_weights(seen: dict[str, Any]) -> None:
    for before, after in zip(seen["partial"], seen["finished"], strict=True):
        assert (before["status"], before["versions"]) == ("aborted", ["old"])
        assert 0 < before["length"] == len(before["logprobs"]) < LONGEST
        assert after["tokens"][: len(before["tokens"])] == before["tokens"]
        assert after["versions"] == ["old", "new"]
        assert after["status"] == "truncated"
        assert after["length"] == len(after["logprobs"]) == LONGEST


def test_whole_rollouts_are_made_and_the_rest_is_given_back(
    seen: dict[str, Any],
) -> None:
    for name in ("first", "second"):
        groups = seen[name]
        assert [len(group) for group in groups] == [2, 2]
        for sample in (each for group in groups for each in group):
            assert sample["status"] in ("completed", "truncated")
            assert sample["length"] == len(sample["logprobs"]) == sample["reward"]
            assert set(sample["versions"]) == {"new"}
    assert all(
        sample["status"] in ("aborted", "completed", "truncated", "pending")
        for group in seen["given back"]
        for sample in group
    )
