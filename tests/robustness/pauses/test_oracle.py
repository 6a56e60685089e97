"""The checks of the cells find what they are there for."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.pauses import cells
from tests.robustness.pauses.live import Stream
from tests.robustness.pauses.scene import params_of, prompt_of
from tests.robustness.pauses.subjects import NEW, OLD, Subject
from tests.support.engines.mixtures import mixed

pytestmark = pytest.mark.engine

LAYER = ("model.layers.1.*",)
DEVICES = {"cpu": "inflight_gloo", "cuda": "inflight_ipc"}


@pytest.fixture(scope="module")
def subject(subject_of: Any, device: str) -> Subject:
    found: Subject = subject_of(cells.DENSE, 1, DEVICES[device])
    return found


def streams(subject: Subject, folder: Path, mode: str) -> list[Stream]:
    """Requests through a commit, whose new version is called `new`."""
    live = subject.live
    live.call("update_weights_from_disk", str(subject.folders[OLD]), OLD)
    found = [
        live.send(prompt_of(cells.SHORT, n), params_of(cells.SHORT, n))
        for n in range(3)
    ]
    live.until_begun(found, 20)
    live.call("update_weights_from_disk", str(folder), NEW, mode=mode)
    live.wait(found)
    return found


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
def test_what_is_right_is_right(subject: Subject, mode: str) -> None:
    sent = streams(subject, subject.folders[NEW], mode)
    assert all(len(s.choices[0].spans) == 2 for s in sent)
    assert wrong(subject, sent, mode) == []


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_stamp_of_another_version_is_found(subject: Subject, mode: str) -> None:
    sent = streams(subject, subject.folders[NEW], mode)
    for shift in (-1, 1):
        stamped = deepcopy([stream.choices[0] for stream in sent])
        for stream, choice in zip(sent, stamped, strict=True):
            choice.spans[0].end += shift
            choice.spans[1].start += shift
            choice.kv = []
            found = subject.replay.wrong(stream, choice, keeps_kv=mode == "in_place")
            assert any("is not of" in each for each in found), found


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_kv_of_another_version_is_found(subject: Subject, mode: str) -> None:
    """Tokens that a mode makes do not pass for those of the other mode."""
    sent = streams(subject, subject.folders[NEW], mode)
    other = {"in_place": "retract", "retract": "in_place"}[mode]
    for stream in sent:
        stream.choices[0].kv = []
        assert len(wrong(subject, [stream], other)) > 5


def test_one_changed_token_is_found(subject: Subject) -> None:
    sent = streams(subject, subject.folders[NEW], "in_place")
    for stream in sent:
        (choice,) = stream.choices
        at = len(choice.tokens) // 2
        choice.tokens[at] = (choice.tokens[at] + 1) % 250
    found = wrong(subject, sent, "in_place")
    assert len([each for each in found if "is not what" in each]) >= 3


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_layer_that_stayed_behind_is_found(
    subject: Subject, tmp_path: Path, mode: str
) -> None:
    torn = mixed(subject.folders[NEW], subject.folders[OLD], LAYER, tmp_path / "torn")
    sent = streams(subject, torn, mode)
    for stream in sent:
        found = wrong(subject, [stream], mode)
        assert len([e for e in found if "is not of 'new'" in e]) > 10
        assert not any("is not of 'old'" in each for each in found)
