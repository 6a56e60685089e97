"""The examples run as they are, and show what they promise."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.support.preloaded_process import begin

pytestmark = pytest.mark.engine

LEARNED = "weights change while tokens flow, weights change"
LOGGED = re.compile(
    r"^(\(.* pid=\d+\) )?(INFO|WARNING|ERROR) \d\d-\d\d .*\n", re.MULTILINE
)
"""A line of vLLM's log. Which ones there are depends on the host."""


def run(example: str, *, spawned: bool = False) -> str:
    """What an example itself prints, run as `python -m examples.…`.

    Args:
        example: its name.
        spawned: whether it is a process that imports vLLM itself, also on a CPU.

    """
    environment = dict(os.environ)
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # these tests' own
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        module = f"examples.{example}"
        code = begin(module, [], environment, out, err, spawned=spawned).wait(400)
        shown = out.read_text()
        assert code == 0, shown + err.read_text()[-8000:]
    return LOGGED.sub("", shown)


def test_the_example_with_a_trainer_and_an_llm_in_one_script_learns():
    shown = run("llm_in_one_script")
    said = re.findall(r"\[(\S+)\] '(.*)'", shown)
    assert [version for version, _ in said] == [
        *("default", "step-15", "step-30", "step-45", "step-60")
    ]
    assert LEARNED not in said[0][1]
    assert LEARNED in said[-1][1]
    assert "'step': 60" in shown


@pytest.mark.slow
def test_an_async_llm_streams_while_a_trainer_publishes():
    shown = run("async_llm_in_flight")
    streams = shown.split("stream ")[1:]
    spans = [re.findall(r"^ +(\d+)-(\d+) +(\S+)", one, re.M) for one in streams]
    assert any(len(versions) > 1 for versions in spans)
    assert all(versions[-1][1] == "504" for versions in spans)
    assert [version for _, _, version in spans[-1]] == ["step-60"]


@pytest.mark.slow
def test_upstreams_trainer_interface_and_a_server_over_http():
    shown = run("broadcast_over_http")
    said = re.findall(r"\['(\S+)'\] '(.*)'", shown)
    assert [label for label, _ in said] == [
        "default",
        "step-20",
        "step-40",
        "step-60",
    ]
    assert LEARNED not in said[0][1]
    assert LEARNED in said[-1][1]


@pytest.mark.slow
def test_a_stream_is_paused_and_goes_on():
    shown = run("pause_resume")
    pauses = re.findall(r"paused ([\d.]+) s after (\d+)", shown)
    waits = re.findall(r"longest wait for a token: ([\d.]+)", shown)
    assert re.findall(r"tokens during the pause: (\d+)", shown) == ["0", "0"]
    assert re.findall(r"tokens in all: (\d+)", shown) == ["504", "504"]
    for (paused, num_before), wait in zip(pauses, waits, strict=True):
        # It sleeps a second of the pause; nothing came for as long, at the least.
        assert float(paused) >= 1 and float(wait) >= 1
        assert 32 <= int(num_before) < 504
    labels = re.findall(r"\d+-\d+ +(\S+)", shown)
    assert labels == ["default", "after-in_place", "after-in_place", "after-retract"]


def test_the_partial_rollout_example_reports_the_ratios_of_each_version():
    shown = run("partial_rollouts")
    kept, recomputed = shown.split("retract:")
    for part, is_exact in ((kept, False), (recomputed, True)):
        lines = re.findall(r"(\d+) tokens, mean ratio \S+ farthest from 1: (\S+)", part)
        assert [int(count) for count, _ in lines] == [320, 320, 320]
        *older, newest = (float(off) for _, off in lines)
        assert min(older) > 0.1, "the versions do not differ"
        assert (newest < 0.01) is is_exact


def freed(shown: str) -> list[float]:
    """GiB that were free while a trainer had its turn, beside those before."""
    return [float(gib) for gib in re.findall(r"([\d.]+) GiB more", shown)]


def test_the_hybrid_engine_example_learns_or_says_that_it_needs_a_gpu():
    shown = run("hybrid_engine")
    if not torch.cuda.is_available():
        assert "on GPUs only" in shown
        return
    said = re.findall(r"\[(\S+)\] '(.*)'", shown)
    assert [version for version, _ in said] == [
        *("default", "step-15", "step-30", "step-45", "step-60")
    ]
    assert LEARNED not in said[0][1]
    assert LEARNED in said[-1][1]
    assert len(freed(shown)) == 4 and min(freed(shown)) > 1


def test_requests_outlive_the_turns_of_a_trainer():
    shown = run("colocated_round")
    said = re.findall(r"(\d+)-(\d+) +(\S+) +'(.*)'", shown)
    assert [version for *_, version, _ in said] == [
        *("default", "step-15", "step-30", "step-45")
    ]
    ends = [int(end) for _, end, *_ in said]
    assert [int(begin) for begin, *_ in said] == [0, *ends[:-1]]
    assert ends[-1] == 504
    assert LEARNED in shown.splitlines()[-1]
    is_on_gpu = torch.cuda.is_available()
    assert [gib > 1 for gib in freed(shown)] == [is_on_gpu] * 3


def test_a_trainer_process_and_a_server_over_http():
    shown = run("serve_over_http", spawned=True)
    assert f"['step-60'] '{LEARNED}" in shown
    assert "'weight_version': 'step-60'" in shown
