"""The checks of the cells find what they are there for, at the noise of each model."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.pauses import cells
from tests.robustness.pauses.live import Stream
from tests.robustness.pauses.rows import MODELS, QUICK
from tests.robustness.pauses.scene import params_of, prompt_of
from tests.robustness.pauses.subjects import FP8, INT8, NEW, OLD, Subject
from tests.support.engines.mixtures import mixed
from vllm.inflight.calls import StartUpdate

pytestmark = pytest.mark.engine

NUM_TOKENS = 480
"""Of a request. On a busy machine 160 may end before the commit comes."""
LAYER = ("model.layers.1.*",)
Correct = Callable[[str], list[Stream]]
DEVICES = {"cpu": "inflight_gloo", "cuda": "inflight_ipc"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in MODELS
    ],
)
def judged(request: pytest.FixtureRequest, subject_of: Any, device: str) -> Subject:
    """An engine of each model, whose noise is what its cells allow."""
    found: Subject = subject_of(request.param, 1, DEVICES[device])
    return found


def streams(subject: Subject, folder: Path, mode: str) -> list[Stream]:
    """Requests through a commit, whose new version is called `new`."""
    live = subject.live
    live.call("update_weights_from_disk", str(subject.folders[OLD]), OLD)
    # Staged before: on a fast machine the requests might end sooner.
    live.control("start", StartUpdate(transport="local"))
    live.update_weights({"update_info": {"path": str(folder)}})
    live.call("prepare_weight_update")
    found = []
    for number in range(3):
        params = params_of(cells.SHORT, number)
        params.max_tokens = NUM_TOKENS
        found.append(live.send(prompt_of(cells.SHORT, number), params, subject.lora))
    live.until_begun(found, 20)
    live.call("finish_weight_update", NEW, mode=mode)
    live.wait(found)
    labels = [[span.version for span in s.choices[0].spans] for s in found]
    assert labels == [[OLD, NEW]] * 3, f"the commit came too late: {labels}"
    return found


@pytest.fixture(scope="module")
def correct(judged: Subject) -> Correct:
    """`correct(mode)`: streams through a correct commit, made once for all tests.

    Each call copies what the clients have, for the test to change.
    """
    made: dict[str, list[Stream]] = {}

    def of(mode: str) -> list[Stream]:
        if mode not in made:
            made[mode] = streams(judged, judged.folders[NEW], mode)
        return [replace(s, choices=deepcopy(s.choices)) for s in made[mode]]

    return of


def wrong(subject: Subject, sent: list[Stream], mode: str) -> list[str]:
    return [
        complaint
        for stream in sent
        for choice in stream.choices
        for complaint in subject.replay.wrong(
            stream, choice, keeps_kv=mode == "in_place"
        )
    ]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_the_oracle_finds_no_fault_in_correct_streams(
    judged: Subject, correct: Correct, mode: str
) -> None:
    sent = correct(mode)
    assert wrong(judged, sent, mode) == []


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_stamp_of_another_version_is_found(
    judged: Subject, correct: Correct, mode: str
) -> None:
    # One token of 33 of another version passes for its own where fp8 is allowed for,
    # and one of 96 where int8 is. Which token is stamped wrong, the commit decides.
    may_miss = 1 if judged.replay.noise in (FP8, INT8) else 0
    for shift in (-1, 1):
        missed = []
        for stream in correct(mode):
            (choice,) = stream.choices
            choice.spans[0].end += shift
            choice.spans[1].start += shift
            choice.kv = []
            found = judged.replay.wrong(stream, choice, keeps_kv=mode == "in_place")
            if not any("is not of" in each for each in found):
                missed.append(found)
        assert len(missed) <= may_miss, missed


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_kv_of_another_version_is_found(
    judged: Subject, correct: Correct, mode: str
) -> None:
    """Tokens that a mode makes do not pass for those of the other mode."""
    other = {"in_place": "retract", "retract": "in_place"}[mode]
    for stream in correct(mode):
        stream.choices[0].kv = []
        assert len(wrong(judged, [stream], other)) > 5


def test_one_changed_token_is_found(judged: Subject, correct: Correct) -> None:
    sent = correct("in_place")
    for stream in sent:
        (choice,) = stream.choices
        at = len(choice.tokens) // 2
        choice.tokens[at] = (choice.tokens[at] + 1) % 250
    found = wrong(judged, sent, "in_place")
    assert len([each for each in found if "is not what" in each]) >= 3


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_layer_that_stayed_behind_is_found(
    judged: Subject, tmp_path: Path, mode: str
) -> None:
    torn = mixed(judged.folders[NEW], judged.folders[OLD], LAYER, tmp_path / "torn")
    sent = streams(judged, torn, mode)
    for stream in sent:
        found = wrong(judged, [stream], mode)
        assert len([e for e in found if "is not of 'new'" in e]) > 10
        assert not any("is not of 'old'" in each for each in found)
