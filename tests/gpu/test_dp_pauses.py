"""Pauses of two data-parallel engines that share experts out, with CUDA graphs.

Requests run on both engines. They step together, so both pause, switch and continue at
one step. A transformers model, which knows nothing of parallelism, judges the tokens.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.conftest import play, subject_of  # noqa: F401 (fixtures)
from tests.robustness.pauses.live import Live, Stream
from tests.robustness.pauses.scene import WATCHED_S
from tests.robustness.pauses.subjects import NEW, OLD, Subject
from tests.robustness.pauses.test_oracle import DEVICES, wrong
from tests.robustness.pauses.test_uses import (
    begun,
    counts,
    flow_again,
    live,  # noqa: F401 (a fixture)
    load,
    whole,
)
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import PauseDecoding, ReadChecksums, StartUpdate, call_to_dict
from vllm.inflight.engine.utility import inflight
from vllm.inflight.errors import InflightError, PauseConflict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
needs_three = pytest.mark.skipif(
    torch.cuda.device_count() < 3, reason="the trainer needs a third GPU"
)

NUM_TOKENS = 1600
STOPPED_S = 0.3
"""In which an engine stops whose pause has no reply yet."""
POISONED = "model.layers.0.self_attn.o_proj.weight"
"""A tensor of which both engines have all."""


def shared_out(mode: str, when: str, change: str, flush: bool = False) -> cells.Cell:
    return cells.Cell(mode, when, flush, change, 1, cells.SHARED_OUT)


IN_A_PAUSE = [
    shared_out(mode, cells.PAUSE, change)
    for change in (cells.NONE, cells.FILES, cells.ROLLBACK)
    for mode in cells.MODES
]
AT_A_COMMIT = [
    shared_out(mode, cells.COMMIT, change)
    for change in (cells.FILES, cells.LENT, cells.ROLLBACK)
    for mode in ("in_place", "retract", "abort")
]
FLUSHED = [
    shared_out("retract", cells.PAUSE, cells.FILES, True),
    shared_out("abort", cells.COMMIT, cells.LENT, True),
]
FROM_A_THIRD_GPU = [
    shared_out("in_place", cells.COMMIT, cells.COLLECTIVE),
    shared_out("retract", cells.PAUSE, cells.COLLECTIVE),
]


@pytest.fixture(scope="module")
def subject(subject_of: Any, device: str) -> Subject:  # noqa: F811
    found: Subject = subject_of(cells.SHARED_OUT, 1, DEVICES[device])
    return found


@pytest.fixture
def sent(live: Live) -> Iterator[list[Stream]]:  # noqa: F811
    """Requests that run, two on each engine."""
    found = begun(live, num_tokens=NUM_TOKENS)
    assert sorted(stream.engine for stream in found) == [0, 0, 1, 1]
    yield found
    for stream in found:
        stream.future.cancel()


@pytest.mark.parametrize("cell", [*IN_A_PAUSE, *AT_A_COMMIT, *FLUSHED], ids=str)
def test_every_token_is_of_the_weights_that_its_spans_name(
    play: rows.Play,  # noqa: F811
    cell: cells.Cell,
) -> None:
    play(cell)


def test_a_commit_that_would_wait_for_the_requests_is_rejected(
    subject: Subject,
    live: Live,  # noqa: F811
    sent: list[Stream],
) -> None:
    with pytest.raises(PauseConflict, match="step together"):
        load(subject, NEW, mode="wait")
    stay_on_the_old_weights(subject, sent)


def test_an_engine_that_is_paused_alone_waits_for_the_other_to_pause(
    subject: Subject,
    live: Live,  # noqa: F811
    sent: list[Stream],
) -> None:
    first, second = (pause_of(live, number) for number in range(2))
    pausing = live.later(first)
    time.sleep(STOPPED_S)
    before = counts(sent)
    time.sleep(WATCHED_S)
    for stream, had in zip(sent, before, strict=True):
        assert (stream.num_tokens > had) == (stream.engine == 1)
        assert not stream.future.done()
    assert not pausing.done(), "one engine has replied for both"
    replies = [live.later(second).result(timeout=60), pausing.result(timeout=60)]
    for reply in replies:
        assert reply["ok"]["paused"] and reply["ok"]["num_running"] == 2
    live.settle()
    before = counts(sent)
    load(subject, NEW)
    time.sleep(WATCHED_S)
    assert counts(sent) == before, "tokens came in the pause"
    live.call("continue_generation")
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    for stream in sent:
        assert [s.version for s in stream.choices[0].spans] == [OLD, NEW]
    assert wrong(subject, sent, "in_place") == []


def pause_of(live: Live, number: int) -> Any:  # noqa: F811
    """The coroutine of a pause of one engine alone."""
    call = PauseDecoding("in_place")
    client = live.engine.engine_core
    each = client.call_utility_each(inflight.__name__, call.name, call_to_dict(call))
    for other, coroutine in enumerate(each):
        if other != number:
            coroutine.close()
    return each[number]


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize("fault", ["nowhere", "poisoned", "other"])
def test_what_one_engine_cannot_prepare_is_served_by_none(
    subject: Subject,
    live: Live,  # noqa: F811
    sent: list[Stream],
    tmp_path: Path,
    fault: str,
    refusing: int,
) -> None:
    before = digests(live)
    infos = [{"path": str(subject.folders[NEW])} for _ in range(2)]
    told = f"engine {refusing} of 2"
    if fault == "nowhere":
        infos[refusing]["path"] = str(tmp_path / "nowhere")
    elif fault == "poisoned":
        infos[refusing]["path"] = str(poisoned(subject.folders[NEW], tmp_path))
    else:
        infos[refusing]["path"] = str(subject.folders[OLD])
        told = "staged different weights"
    live.control("start", StartUpdate(transport="local"))
    with pytest.raises(InflightError, match=told):
        live.update_weights({"update_info": infos})
        live.call("finish_weight_update", NEW)
    assert live.call("weight_update_status")["active"] is None
    assert digests(live) == before
    stay_on_the_old_weights(subject, sent)
    assert load(subject, NEW)["weight_version"] == NEW


def poisoned(folder: Path, into: Path) -> Path:
    """A checkpoint with a NaN."""
    tensors = load_file(folder / "model.safetensors")
    tensors[POISONED].view(-1)[7] = float("nan")
    save_file(tensors, into / "model.safetensors")
    return into


def stay_on_the_old_weights(subject: Subject, sent: list[Stream]) -> None:
    """Raise unless decoding goes on to the end as if nothing had been asked."""
    flow_again(sent)
    subject.live.wait(sent)
    whole(sent, NUM_TOKENS)
    for stream in sent:
        assert [s.version for s in stream.choices[0].spans] == [OLD]
    assert wrong(subject, sent, "in_place") == []
    assert subject.live.call("get_weight_version") == OLD


def test_both_engines_roll_back_to_the_weights_that_they_had(
    subject: Subject,
    live: Live,  # noqa: F811
    sent: list[Stream],
) -> None:
    live.pause("in_place")  # so that no request ends before a version comes
    before = digests(live)
    for _ in range(2):
        load(subject, NEW)
        for rank, had in zip(digests(live), before, strict=True):
            assert rank.keys() == had.keys() and rank != had
        decode_some(live, sent)
        assert live.call("rollback_weights")["weight_version"] == OLD
        assert digests(live) == before
        decode_some(live, sent)
    live.call("continue_generation")
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    assert {len(stream.choices[0].spans) for stream in sent} == {5}
    assert wrong(subject, sent, "in_place") == []


def decode_some(live: Live, sent: list[Stream]) -> None:  # noqa: F811
    """End a pause until every request has a further token."""
    live.call("continue_generation")
    flow_again(sent)
    live.pause("in_place")


def digests(live: Live) -> list[dict[str, str]]:  # noqa: F811
    """Of every parameter that is served, of each engine."""
    replies = live.later(control_of(live.engine).ask(ReadChecksums())).result(60)
    return [rank["checksums"] for reply in replies for rank in reply["ranks"]]


@needs_three
@pytest.mark.parametrize("cell", FROM_A_THIRD_GPU, ids=str)
def test_both_engines_take_a_version_from_a_trainer_on_a_third_gpu(
    play: rows.Play,  # noqa: F811
    cell: cells.Cell,
) -> None:
    play(cell)
