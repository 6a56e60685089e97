"""Frameworks that build vLLM's application themselves, on a real engine."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine

PLAIN = Path(__file__).parents[1] / "support" / "client_records" / "plain.json"


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    return run_script("framework_server", checkpoint(0), checkpoint(1))


def test_vllms_own_clients_are_answered_as_by_vllm(seen: dict[str, Any]) -> None:
    recorded = json.loads(PLAIN.read_text())["server"]
    assert recorded == f"vllm {version('vllm')}", "record them again"
    # Plain vLLM counts the ids that it was given, and ours the requests that ended.
    counted = [
        "POST /abort_requests",
        {"request_ids": ["no such request"]},
        [200, 200],
        {"status": "aborted", "aborted": 1},
        {"status": "aborted", "aborted": 0},
    ]
    assert seen["otherwise"] == [counted]


def test_prime_rls_routes_are_its_own_and_pause_the_engine(
    seen: dict[str, Any], checkpoint: Callable[..., Path]
) -> None:
    paused, while_paused, updated, resumed, afterwards = seen["prime-rl"]
    assert [paused, updated, resumed] == [
        {"status": "paused"},
        {"status": "ok"},
        {"status": "resumed"},
    ]
    assert (while_paused, afterwards) == (True, False)
    assert seen["paths"] == [str(checkpoint(1))]


def test_pipelinerls_workers_meet_its_trainer_in_a_group_of_vllms(
    seen: dict[str, Any],
) -> None:
    reply, has_come, has_group = seen["pipelinerl"]
    assert (reply, has_come, has_group) == ({"status": "ok"}, True, True)


def test_a_route_that_is_added_last_answers_too(seen: dict[str, Any]) -> None:
    assert seen["skyrl"] == {"status": "ok"}


def test_our_routes_answer_in_an_application_that_a_framework_builds(
    seen: dict[str, Any],
) -> None:
    assert seen["ours"] == "named"
    assert seen["refused"]["error"]["code"] == "malformed"


def test_the_older_word_for_a_pause_that_waits_is_taken_by_the_method(
    seen: dict[str, Any],
) -> None:
    assert seen["waited: False"] == "abort"
    assert seen["waited: True"] == "length"
