"""A long run made short, and that its judge, its pulse and its clients find faults."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.robustness.soak.history import History
from tests.robustness.soak.judge import Answer, Era, Judge, covered
from tests.robustness.soak.load import Load, Plan
from tests.robustness.soak.pulse import Beat, Pulse
from tests.support.models.tiny import make_checkpoint

ROOT = Path(__file__).parents[3]
LAST = re.compile(r"\d+ updates, \d+ faults, \d+ tokens, \d+ lost, \d+ torn")


def soak(
    out: Path, minutes: float, backend: str, staging: str = "auto"
) -> dict[str, Any]:
    """Run it, and check what every run must have; the report."""
    least = max(1, round(3 * minutes))
    options = "--seconds", f"{60 * minutes:.0f}", "--seed", "1", "--out", str(out)
    options += "--least", str(least)
    options += "--backend", backend, "--staging", staging
    done = subprocess.run(
        [sys.executable, "-m", "tests.robustness.soak", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support" / "calm")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert LAST.fullmatch(last) and last.endswith(" 0 lost, 0 torn")
    (file,) = out.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    assert min(found["updates"], sum(found["faults"].values())) >= least
    assert (found["sent"] > 0) is (found["joined"] > 0) is (backend != "local")
    assert found["tokens"] > 1000 * minutes
    assert found["replayed"]["answers"] >= 0.05 * found["requests"]
    return found


@pytest.mark.engine
@pytest.mark.parametrize(
    ("minutes", "backend", "staging"),
    [
        (0.25, "local", "auto"),
        pytest.param(3, "local", "auto", marks=pytest.mark.slow),
        pytest.param(1.5, "inflight_gloo", "auto", marks=pytest.mark.slow),
        pytest.param(1.5, "inflight_gloo", "delta", marks=pytest.mark.slow),
    ],
)
def test_a_soak_of_minutes_loses_no_request_and_tears_no_output(
    tmp_path: Path, minutes: float, backend: str, staging: str
) -> None:
    soak(tmp_path, minutes, backend, staging)


# ------------------------------------------------------------------- the judge
@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("soak")
    return {name: make_checkpoint(root / name, i) for i, name in enumerate("ab")}


@pytest.fixture
def history() -> History:
    """Epoch 0 is checkpoint a; epoch 1 is a with the MLPs of b."""
    history = History("aa")
    history.serves({"epoch": 1, "weight_version": "mixed"}, "mixed", "ab")
    return history


@pytest.fixture
def judge(folders: dict[str, Path], history: History) -> Judge:
    return Judge(folders, history)


def answer(judge: Judge, trail: Any, eras: Any = None) -> Answer:
    """What `trail` says when it is computed, and nothing is wrong."""
    prompt = [(7 * i) % 250 for i in range(20)]
    tokens = [(11 * i) % 250 for i in range(trail[-1][1] - 19)]
    spans = [
        (max(s - 19, 0), e - 19, epoch, ("default", "mixed")[epoch])
        for s, e, epoch in trail
    ]
    made = Answer("request", prompt, tokens, [0.0] * len(tokens), spans)
    made.eras = eras or [Era(0, 1, len(tokens), trail)]
    for index, _, logprobs in judge._replay(made, trail):
        made.logprobs[index] = logprobs[tokens[index]].item()
    return made


def test_an_answer_that_its_weights_computed_is_not_judged_torn(
    judge: Judge, history: History
) -> None:
    right = answer(judge, [(0, 30, 0), (30, 60, 1)])
    assert covered(right, history) is None
    assert judge.torn(right) == []


def test_a_token_of_other_weights_is_torn(judge: Judge) -> None:
    wrong = answer(judge, [(0, 30, 0), (30, 60, 1)])
    (era,) = wrong.eras
    era.trail = [(0, 31, 0), (31, 60, 1)]
    wrong.spans = [(0, 12, 0, "default"), (12, 41, 1, "mixed")]
    assert judge.torn(wrong)


def test_kv_of_other_weights_is_torn(judge: Judge) -> None:
    wrong = answer(judge, [(0, 30, 0), (30, 60, 1)])
    (era,) = wrong.eras
    era.trail = [(0, 60, 1)]
    assert len(judge.torn(wrong)) > 10


def test_the_judge_accepts_a_chunk_with_tokens_from_both_sides_of_a_retraction(
    judge: Judge,
) -> None:
    """Twelve tokens under epoch 0; then all KV again under 1, in the chunk of 8..20."""
    before: Any = [(0, 31, 0)]
    after: Any = [(0, 60, 1)]
    made = answer(judge, after)
    made.spans = [(0, 12, 0, "default"), (12, 41, 1, "mixed")]
    made.eras = [Era(0, 1, 8, [(0, 27, 0)]), Era(8, 20, 41, after)]
    for index, _, logprobs in judge._replay(made, before):
        made.logprobs[index] = logprobs[made.tokens[index]].item()
    assert judge.torn(made) == []
    made.eras[1].first = 10
    assert len(judge.torn(made)) == 2


@pytest.mark.parametrize(
    ("spans", "what"),
    [
        ([(0, 4, 0, "default"), (5, 8, 1, "mixed")], "hole"),
        ([(0, 4, 1, "mixed"), (4, 8, 0, "default")], "follows"),
        ([(0, 8, 2, "mixed")], "never been served"),
        ([(0, 8, 1, "default")], "is called"),
        ([(0, 7, 1, "mixed")], "cover 7 of 8"),
    ],
)
def test_spans_that_do_not_match_the_tokens_are_reported(
    history: History, spans: Any, what: str
) -> None:
    told = covered(Answer("request", [1], [0] * 8, spans=spans), history)
    assert told is not None and what in told


# ------------------------------------------------------- the pulse, the clients
@pytest.mark.parametrize(("per_beat", "grows"), [(0.0, False), (0.05, True)])
def test_growing_memory_is_distinguished_from_varying_memory(
    per_beat: float, grows: bool
) -> None:
    pulse = Pulse()
    noise = torch.randn(1200, generator=torch.Generator().manual_seed(0)).tolist()
    pulse.beats = [
        Beat(float(at), 2000 + 3 * noise[at] + per_beat * at, 70, 160, at % 2)
        for at in range(1200)
    ]
    told = {name: slope["grows"] for name, slope in pulse.slopes().items()}
    flat = ("threads", "descriptors", "shared_files", "gpu_mib")
    assert told == {"memory_mib": grows} | dict.fromkeys(flat, False)


@pytest.mark.parametrize(("per_beat", "grows"), [(0.0, False), (0.5, True)])
def test_what_goes_and_comes_back_does_not_count_as_growth(
    per_beat: float, grows: bool
) -> None:
    """A transport's buckets are freed with its group, and taken again later."""
    pulse = Pulse()
    pulse.beats = [
        Beat(float(at), 2000, 70, 160, 0, 1926 + per_beat * at - 386 * (at % 450 > 400))
        for at in range(1, 900)
    ]
    assert pulse.slopes()["gpu_mib"]["grows"] is grows


@pytest.mark.parametrize("at", [460, 890])
@pytest.mark.parametrize(("per_beat", "grows"), [(0.0, False), (1 / 60, True)])
def test_one_beat_hides_no_growth_and_is_none(
    at: int, per_beat: float, grows: bool
) -> None:
    pulse = Pulse()
    pulse.beats = [
        Beat(
            float(n),
            2000 + 9 * per_beat * n + 120 * (n == at),
            70 + round(per_beat * n) + 16 * (n == at),
            160 + round(per_beat * n) + 3 * (n == at),
            0,
            1926 + 9 * per_beat * n + 120 * (n == at),
        )
        for n in range(1, 900)
    ]
    told = {name: slope["grows"] for name, slope in pulse.slopes().items()}
    names = ("memory_mib", "gpu_mib", "threads", "descriptors")
    assert told == {"shared_files": False} | dict.fromkeys(names, grows)


@pytest.mark.parametrize(
    ("open_groups", "tensors_mib", "is_wrong", "grow"),
    [(1, 100, False, False), (2, 100, True, False), (1, 120, False, True)],
)
def test_groups_and_tensors_kept_by_a_rank_are_reported(
    history: History, open_groups: int, tensors_mib: float, is_wrong: bool, grow: bool
) -> None:
    kept = {"groups": open_groups, "open_groups": open_groups}
    for memory in (100, 100, 100, tensors_mib):
        history.note_held([kept | {"tensors_mib": memory}])
    assert bool(history.wrong) is is_wrong
    assert bool(history.tensors_grow()) is grow


class Mute:
    """An engine whose streams end at once, for a reason of its own."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    async def generate(self, *_: Any) -> Any:
        choice = type("Choice", (), {"token_ids": [1], "weight_versions": []})()
        choice.finish_reason, choice.logprobs = self.reason, None
        yield type("Output", (), {"outputs": [choice]})()


@pytest.mark.parametrize("reason", ["length", "stop", "abort", "error"])
def test_a_request_that_ends_without_a_cause_counts_as_lost(reason: str) -> None:
    history = History("aa")
    load: Any = Load(
        Mute(reason), history, seed="1", judged_share=0, judge=lambda _: load.close()
    )
    load._plan = lambda: Plan(
        "request", [1], SamplingParams(max_tokens=9), None, takes_back=False
    )
    asyncio.run(load.run(1))
    assert history.num_lost == 1


# -------------------------------------------------------------------- make soak
@pytest.mark.parametrize(("given", "seconds"), [([], 1200), (["SECONDS=7"], 7)])
def test_make_soak_takes_its_seconds_from_the_command_line_only(
    given: list[str], seconds: int
) -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "soak", *given],
        cwd=ROOT,
        env=os.environ | {"SECONDS": "31"},  # as bash has it, if it is exported
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"tests.robustness.soak --seconds {seconds}\n" in printed
