"""The tripwire of a rank, on a model of two layers: what it notices, and mends."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight.worker.integrity import fingerprint
from vllm.inflight.worker.integrity.tripwire import Tripwire, tripwire_of
from vllm.inflight.worker.status_board import StatusBoard

NAMES = "up.weight", "down.weight"


class Model(torch.nn.Module):
    """Loads by name, as a model of upstream's does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def load_weights(self, weights: Any) -> set[str]:
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            params[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


class Worker:
    """Has a model, and a drafter if one is given."""

    def __init__(self, draft: torch.nn.Module | None = None, **parallel: bool) -> None:
        self.model = Model()
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model, get_draft_model=lambda: draft
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(**({"enable_eplb": False} | parallel)),
            speculative_config=None,
        )
        self.wire = Tripwire(self)
        self.wire.arm()

    @property
    def is_written(self) -> bool:
        return self.wire.look().is_written


@pytest.fixture
def worker() -> Worker:
    return Worker()


def fresh(name: str = "up.weight") -> Iterator[tuple[str, torch.Tensor]]:
    yield name, torch.randn(128, 64) if "up" in name else torch.randn(64, 128)


def test_the_tripwire_reports_no_write_where_nothing_was_written(
    worker: Worker,
) -> None:
    worker.model.load_weights([])
    worker.model.load_weights(iter(()))
    worker.model.up(torch.randn(3, 64))
    assert not worker.is_written and not worker.is_written


def test_weights_that_steps_copy_back_are_compared_by_their_bytes_alone(
    worker: Worker,
) -> None:
    up, down = worker.model.up.weight, worker.model.down.weight

    def step() -> None:
        with torch.no_grad():
            up.copy_(up.clone())

    step()
    assert worker.is_written  # nobody has told that steps do this
    worker.wire.acknowledge()
    step()  # while the engine is warmed up
    worker.wire.warmed_up()
    worker.wire.arm()
    for _ in range(3):
        step()
        assert not worker.is_written
    with torch.no_grad():
        up.add_(1)
    assert worker.is_written
    worker.wire.acknowledge()
    step()
    with torch.no_grad():
        down.copy_(down.clone())  # no step writes these
    assert worker.is_written


def test_parameters_that_the_start_replaces_are_watched_as_all_others(
    worker: Worker,
) -> None:
    with torch.no_grad():
        worker.model.up.weight.add_(1)
        again = torch.nn.Parameter(worker.model.up.weight.detach().clone())
        worker.model.up.weight = again
    worker.wire.warmed_up()
    worker.wire.arm()
    with torch.no_grad():
        again.copy_(again.clone())
    assert worker.is_written


@pytest.mark.parametrize("kind", [list, tuple, dict, iter])
def test_a_load_is_detected_for_every_kind_of_argument(
    worker: Worker, kind: Any
) -> None:
    pairs = kind([("up.weight", worker.model.up.weight.detach().clone())])
    pairs = pairs.items() if isinstance(pairs, dict) else pairs
    assert worker.model.load_weights(pairs) == {"up.weight"}
    assert worker.is_written  # though the numbers are what they were
    worker.wire.acknowledge()
    assert not worker.is_written


def test_a_load_is_noted_before_it_writes(worker: Worker) -> None:
    seen = []

    def pairs() -> Any:
        for pair in fresh():
            seen.append(worker.wire._is_written)
            yield pair
            seen.append(worker.wire._is_written)

    worker.model.load_weights(pairs())
    assert seen == [False, True]


def test_a_copied_model_is_loaded_without_a_write_to_the_original(
    worker: Worker,
) -> None:
    before = worker.model.up.weight.detach().clone()
    for copied in (
        copy.deepcopy(worker.model),
        pickle.loads(pickle.dumps(worker.model)),
    ):
        copied.load_weights([("up.weight", torch.ones(128, 64))])
        assert copied.up.weight.eq(1).all()
    assert worker.model.up.weight.equal(before) and not worker.is_written


def test_a_load_of_the_drafter_is_noted() -> None:
    draft = Model()
    worker = Worker(draft)
    draft.load_weights(fresh())
    assert worker.is_written
    worker.wire.acknowledge()
    draft.down.weight.data.zero_()
    assert worker.is_written


WRITES = {
    "copy_": lambda p: p.detach().copy_(torch.ones_like(p)),
    "data": lambda p: p.data.fill_(1),
    "data of a part": lambda p: p.data[3:5].fill_(1),
    "another tensor": lambda p: setattr(p, "data", torch.ones_like(p)),
    "its memory": lambda p: p.data.numpy().fill(1),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("name", NAMES)
def test_a_write_into_a_parameter_is_seen(worker: Worker, way: str, name: str) -> None:
    WRITES[way](worker.model.get_parameter(name))
    assert worker.is_written


def test_a_parameter_in_the_place_of_another_is_seen(worker: Worker) -> None:
    same = torch.nn.Parameter(worker.model.up.weight.detach().clone())
    worker.model.up.weight = same
    assert worker.is_written


def put_elsewhere(model: Model) -> torch.Tensor:
    model.up.weight.data = torch.full((128, 64), 2.0)
    return model.up.weight


def put_another_there(model: Model) -> torch.Tensor:
    model.up.weight = torch.nn.Parameter(torch.full((128, 64), 2.0))
    return model.up.weight


@pytest.mark.parametrize("move", [put_elsewhere, put_another_there])
def test_a_weight_put_elsewhere_returns_to_the_place_that_is_kept(
    worker: Worker, move: Any
) -> None:
    """A GPU's graphs read the places, and updates exchange the pages of them."""
    worker.wire.keep_places()
    own = worker.model.up.weight
    place = own.data_ptr()
    move(worker.model)
    assert worker.is_written
    assert worker.model.up.weight is own and own.data_ptr() == place
    assert own.eq(2).all()
    worker.wire.acknowledge()
    assert not worker.is_written


def test_a_weight_of_another_shape_stays_where_it_was_put_and_is_reported(
    worker: Worker,
) -> None:
    worker.wire.keep_places()
    worker.model.up.weight = torch.nn.Parameter(torch.ones(64, 128))
    told = worker.wire.look()
    assert told.is_written and told.displaced == ["up.weight"]
    assert worker.model.up.weight.shape == (64, 128)


def test_the_sampled_lines_are_found_once_while_weights_stay_where_they_are(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = fingerprint.Lines
    monkeypatch.setattr(
        fingerprint, "Lines", lambda tensors: made.append(1) or real(tensors)
    )
    worker.wire.keep_places()
    for _ in range(3):
        assert not worker.is_written
    assert len(made) == 1
    worker.model.up.weight.data.fill_(1)
    assert worker.is_written and len(made) == 1
    worker.wire.acknowledge()
    worker.model.up.weight = torch.nn.Parameter(torch.ones(64, 128))
    assert worker.is_written and len(made) == 2


def test_without_kept_places_nothing_holds_memory_that_a_model_has_left(
    worker: Worker,
) -> None:
    assert not worker.is_written
    left = weakref.ref(worker.model.up.weight)
    memory = weakref.ref(worker.model.up.weight.untyped_storage())
    worker.model.up.weight = torch.nn.Parameter(torch.ones(128, 64))
    gc.collect()
    assert left() is None and memory() is None


def test_expert_moves_by_upstream_do_not_count_as_writes() -> None:
    worker = Worker(enable_eplb=True)
    worker.model.up.weight.data.fill_(1)
    assert not worker.is_written
    worker.model.load_weights(fresh())
    assert worker.is_written


def test_weights_that_sleep_are_not_read(worker: Worker) -> None:
    worker.wire.note_asleep(("weights",), ("weights",))
    worker.model.up.weight.data.fill_(1)
    report = worker.wire.look()
    assert report.asleep == ["weights"] and not report.is_written
    worker.wire.note_awake(None, ())
    assert worker.is_written


def test_an_update_does_not_count_as_a_write(worker: Worker) -> None:
    worker.model.up.weight.data.fill_(1)
    worker.wire.changed()
    worker.wire.arm()
    assert not worker.is_written


def test_only_an_eager_tripwire_detects_writes_right_after_an_update(
    worker: Worker,
) -> None:
    board = StatusBoard.create(1)
    for is_eager in (False, True):
        worker.wire.attach(board.path, 1, is_eager)
        worker.wire.changed()
        worker.model.up.weight.data.mul_(2)
        worker.wire.arm()
        assert worker.is_written is is_eager
    board.unlink()
    board.close()


def test_a_load_touches_the_status_board_and_an_update_does_not(worker: Worker) -> None:
    board = StatusBoard.create(1)
    worker.wire.attach(board.path, 1, False)
    worker.wire.changed()
    assert not board.is_touched()
    worker.model.load_weights(fresh())
    assert board.is_touched()
    board.untouch()
    assert not board.is_touched()
    board.unlink()
    board.close()


def test_a_blank_weight_is_missing_until_all_of_it_is_written(
    worker: Worker,
) -> None:
    kept = worker.model.down.weight.detach().clone()
    worker.wire.make_blank(["do*"])
    assert worker.model.down.weight.equal(kept)
    worker.wire.make_blank()
    told = worker.wire.look()
    assert (told.num_missing, told.num_required) == (2, 2)
    assert told.missing == list(NAMES)
    up = worker.model.up.weight
    up.data[:-1].fill_(1)
    worker.model.load_weights(fresh("down.weight"))
    told = worker.wire.look()
    assert (told.num_missing, told.missing, told.is_written) == (1, ["up.weight"], True)
    up.data[-1].fill_(1)
    assert worker.wire.look().num_missing == 0
    worker.wire.changed()
    assert worker.wire.look().num_required == 0


def test_a_drafter_is_not_waited_for() -> None:
    draft = Model()
    kept = draft.up.weight.detach().clone()
    worker = Worker(draft)
    worker.wire.make_blank()
    assert draft.up.weight.equal(kept)
    assert worker.wire.look().num_required == 2


def test_weights_that_cannot_be_sampled_do_not_count_as_written(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> Any:
        raise torch.OutOfMemoryError("of a test")

    monkeypatch.setattr(fingerprint, "Lines", fail)
    worker.wire.changed()
    worker.wire.arm()
    assert not worker.is_written
    worker.model.load_weights(fresh())
    assert worker.is_written


def test_layers_of_a_freed_model_have_no_tripwire() -> None:
    worker = Worker()
    layer = worker.model.up
    assert tripwire_of(layer) is worker.wire
    wire = worker.wire
    del worker
    gc.collect()
    assert tripwire_of(layer) is wire
    del wire
    gc.collect()
    assert tripwire_of(layer) is None


def test_loads_from_another_thread_are_noted_too(worker: Worker) -> None:
    thread = threading.Thread(target=lambda: worker.model.load_weights(fresh()))
    thread.start()
    thread.join()
    assert worker.is_written
