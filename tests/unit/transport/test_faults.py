"""A transfer that breaks ends with a typed error, soon, and the next one works."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.support.transports.peers import (
    CPU,
    Recorder,
    connect,
    digests,
    engine,
    host,
    init_info,
    open_sender,
    process,
    send,
    stopping,
    tensors,
    transfer,
    update,
)
from vllm.inflight.errors import Cancelled, EngineFault, TransferFault, WeightsMismatch
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.waiting import in_background
from vllm.inflight.update import Manifest
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.staging.loader import UpdateLoader
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.parameter_map import ParameterMap
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint

pytestmark = pytest.mark.seconds

SOON_S = 30.0
"""Far below the minutes of a default, and patient with a busy machine."""


@pytest.fixture
def worker():
    worker = engine()
    yield worker
    worker.shutdown()


def join(worker, port, **changes):
    info = worker.parse_init_info(init_info(port, **changes))
    worker.init_transfer_engine(info)


def works_again(worker):
    """A new group carries the next update."""
    with pytest.raises(TransferFault, match="init_weight_transfer_engine again"):
        update(worker, tensors())
    worker.model = Recorder()
    sender = connect(worker)
    transfer(worker, sender, tensors(3))
    sender.group.close()
    return digests(worker.model.loaded.items()) == digests(tensors(3).items())


def test_a_trainer_killed_in_the_middle_is_noticed_at_once(worker):
    with process(stopping) as trainer:
        join(worker, trainer.pipe.recv(), timeout_s=60.0)
        receiving = in_background(lambda: update(worker, tensors()))
        assert trainer.pipe.recv() == "half"
        trainer.kill()
        killed = time.monotonic()
        with pytest.raises(TransferFault, match="ended") as caught:
            receiving.result(timeout=60)
    assert time.monotonic() - killed < SOON_S
    assert isinstance(caught.value, EngineFault)
    assert works_again(worker)


def test_a_trainer_that_stalls_is_left_when_the_time_is_up(worker):
    with process(stopping) as trainer:
        join(worker, trainer.pipe.recv())
        worker.timeout_s = 2.0
        began = time.monotonic()
        with pytest.raises(TransferFault, match=r"waited 2 s for bucket \d+ of \d+"):
            update(worker, tensors())
        assert time.monotonic() - began < SOON_S
    assert works_again(worker)


def test_a_cancelled_update_ends_at_once_without_blocking_the_interpreter(worker):
    cancelled = threading.Event()
    worker.cancelled = cancelled.is_set
    sender = connect(worker)
    receiving = in_background(lambda: update(worker, tensors()))
    time.sleep(0.3)
    assert not receiving.done()
    asked = time.monotonic()
    cancelled.set()
    with pytest.raises(Cancelled):
        receiving.result(timeout=60)
    assert time.monotonic() - asked < SOON_S
    # Gloo's own thread is still waiting; nobody waits for it.
    before = time.monotonic()
    for _ in range(20):
        time.sleep(0.01)
    assert time.monotonic() - before < SOON_S
    with pytest.raises(TransferFault, match="rank 1 stopped receiving: cancelled"):
        send(sender, tensors())
    cancelled.clear()
    assert works_again(worker)


def test_a_worker_that_gives_up_is_noticed_by_the_trainer_and_the_other_worker():
    meeting = host(world_size=3)
    opening = in_background(lambda: open_sender(meeting))
    workers = [engine(rank=0, size=2), engine(rank=1, size=2)]
    joining = [
        in_background(lambda w=w: join(w, meeting.port, world_size=3, timeout_s=60.0))
        for w in workers
    ]
    for future in joining:
        future.result(timeout=60)
    sender = opening.result()
    workers[0].cancelled = lambda: True
    other = in_background(lambda: update(workers[1], tensors()))
    with pytest.raises(Cancelled):
        update(workers[0], tensors())
    began = time.monotonic()
    with pytest.raises(TransferFault, match="rank 1 stopped receiving"):
        send(sender, tensors())
    with pytest.raises(TransferFault, match=r"the trainer stopped sending: .*rank 1"):
        other.result(timeout=60)
    assert time.monotonic() - began < SOON_S
    for worker in workers:
        worker.shutdown()


def test_a_trainer_whose_tensors_differ_from_the_announced_ones_fails_the_update(
    worker,
):
    sender = connect(worker)
    named = tensors()
    receiving = in_background(lambda: update(worker, named))
    with pytest.raises(
        ValueError, match="'last' and all later entries of the tensor list"
    ):
        send(sender, {n: t for n, t in named.items() if n != "last"}, **named)
    with pytest.raises(TransferFault, match="the trainer stopped sending: 'last'"):
        receiving.result(timeout=60)
    assert works_again(worker)


def test_an_update_that_announces_less_than_its_manifest_is_incomplete(worker):
    """The wire brings what was announced; what is missing is for the intake to say."""
    named = {"a": torch.ones(3), "b": torch.ones(4)}

    class Module(torch.nn.Module):
        def load_weights(self, weights):
            for name, tensor in weights:
                self._parameters[name].data.copy_(tensor)

    module = Module()
    for name, tensor in named.items():
        module.register_parameter(name, torch.nn.Parameter(tensor * 0))
    shadow = SimpleNamespace(
        module=module,
        load=module.load_weights,
        device=CPU,
        required={name: tensor.shape for name, tensor in named.items()},
        known_names={n: (list(t.shape), "float32") for n, t in named.items()},
        asks_loader=False,
        classifier=None,
        ignored=IgnoredTensors(),
        plan=Plan(is_replayed=False),
        log=None,
        tables={},
        views={},
        stale=set(),
        quantised=set(),
        computed={},
        nbytes=28,
        start_checkpoint=StartCheckpoint({}),
        may_idle=lambda name: False,
        has_all=True,
        dtypes={},
        places=ParameterMap.of(module, named, StartCheckpoint({})),
        is_alone=True,
        num_threads=1,
    )
    entries = [
        {"name": n, "shape": list(t.shape), "dtype": "float32"}
        for n, t in named.items()
    ]
    intake = UpdateLoader(
        shadow,
        Manifest.parse({"format": 1, "tensors": entries}),
        verify=False,
        allow_nonfinite=False,
        cancelled=lambda: False,
        progress=lambda num_bytes, num_tensors: None,
    )
    worker.model = intake
    sender = connect(worker)
    transfer(worker, sender, {"a": named["a"]})
    assert intake.num_bytes == 12
    with pytest.raises(WeightsMismatch, match=r"missing: .*b"):
        intake.verdict()
    sender.group.close()


def test_a_trainer_that_left_is_named(worker):
    sender = connect(worker)
    sender.group.close()
    with pytest.raises(TransferFault, match="the trainer has left the group"):
        update(worker, tensors())


def test_an_update_before_the_first_group_is_rejected_with_the_call_to_make(worker):
    with pytest.raises(TransferFault, match="call init_weight_transfer_engine first"):
        update(worker, {"a": torch.ones(1)})


def test_a_worker_loads_exactly_the_announced_tensors(worker):
    sender = connect(worker)
    named = tensors(2)
    less = {name: named[name] for name in ("embedding", "last")}
    transfer(worker, sender, less)
    assert TensorList.of(less.items()).names == tuple(worker.model.loaded)
    sender.group.close()
