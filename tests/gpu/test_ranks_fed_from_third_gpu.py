"""Two tensor-parallel ranks are fed from a trainer on a third GPU while they decode."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_fed_engines import feed
from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.conftest import play, subject_of  # noqa: F401 (fixtures)
from tests.robustness.pauses.live import PATIENCE_S
from tests.robustness.pauses.subjects import NEW, OLD
from tests.robustness.pauses.test_oracle import wrong
from tests.robustness.pauses.test_uses import begun, flow_again, load, whole
from vllm.inflight.transport.waiting import in_background

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 3, reason="needs three GPUs, one for the trainer"
    ),
]

SHAPE = {"hidden": 1024, "layers": 4, "vocab": 20000}
"""So that an update is many buckets."""
BACKENDS = ("inflight_nccl", "inflight_ipc")
SENT = (NEW, OLD) * 3
NUM_TOKENS = 1600

# The pause cells that two ranks need a third GPU for; those of one engine in a row.
CELLS = [
    *(
        cells.Cell(mode, when, False, change, 2, cells.SHORT)
        for change in (cells.UPSTREAMS, cells.COLLECTIVE)
        for when in cells.WHEN
        for mode in cells.MODES
    )
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_ranks_serve_the_weights_from_a_trainer_on_a_third_gpu(
    old: Path, new: Path, backend: str
) -> None:
    feed("two_ranks", old, new, backend)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_token_around_a_pause_is_of_the_weights_that_its_spans_name(
    play: rows.Play,  # noqa: F811
    cell: cells.Cell,
) -> None:
    play(cell)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_token_of_several_versions_in_a_row_is_of_the_one_that_its_spans_name(
    subject_of: Any,  # noqa: F811
    backend: str,
) -> None:
    subject = subject_of(cells.DENSE, 2, backend)
    live, trainer = subject.live, subject.trainer
    load(subject, OLD)
    sent = begun(live, num_tokens=NUM_TOKENS)
    for label in SENT:
        with live.committing(weight_version=label):
            sending = in_background(partial(trainer.send, subject.folders[label]))
            flow_again(sent)  # beside what the trainer sends
            live.pause("in_place")  # so that no request ends before the version comes
            sending.result(timeout=PATIENCE_S)
        live.call("continue_generation")
        flow_again(sent)
    assert live.call("rollback_weights")["weight_version"] == SENT[-2]
    live.wait(sent)
    whole(sent, NUM_TOKENS)
    order = [OLD, *SENT, SENT[-2]]
    for stream in sent:
        labels = [span.version for span in stream.choices[0].spans]
        assert labels == order[: len(labels)]
        assert len(labels) > 3, "the versions came after the requests"
    assert wrong(subject, sent, "in_place") == []
    assert live.call("get_weight_version") == SENT[-2]
