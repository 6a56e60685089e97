"""Nothing of a group is left after its end."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.transports.peers import (
    Recorder,
    connect,
    engine,
    open_things,
    send,
    tensors,
    transfer,
    update,
)
from tests.support.waiting import until
from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.collective.trainer_engine import BroadcastTrainer
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.seconds


def test_a_shutdown_leaves_no_socket_and_no_thread():
    worker = engine()
    # What torch opens once and keeps.
    sender = connect(worker)
    sender.group.close()
    worker.shutdown()
    del sender
    before = open_things()
    for seed in range(3):
        sender = connect(worker)
        transfer(worker, sender, tensors(seed))
        sender.group.close()
        worker.shutdown()
        del sender
    until(lambda: open_things() <= before)


def test_a_worker_can_join_again_after_a_shutdown_and_a_second_shutdown_has_no_effect():
    worker = engine()
    for seed in range(2):
        sender = connect(worker)
        transfer(worker, sender, tensors(seed))
        worker.shutdown()
        worker.shutdown()
        sender.group.close()
        sender.group.close()
    with pytest.raises(TransferFault, match="in no transfer group"):
        update(worker, tensors())


def test_a_shutdown_while_it_receives_ends_the_update_with_the_reason():
    """As a worker's whose engine ends: in its main thread, while another receives."""

    class Leaving(Recorder):
        def load_weights(self, weights):
            for _ in weights:
                worker.shutdown()
                assert worker.gauges == {}

    worker = engine(Leaving())
    sender = connect(worker, timeout_s=20.0)
    sending = in_background(lambda: send(sender, tensors()))
    with pytest.raises(TransferFault, match="has left the group"):
        update(worker, tensors())
    with pytest.raises(TransferFault, match="in no transfer group"):
        update(worker, tensors())
    with suppress(TransferFault):  # if all of it was sent before
        sending.result(timeout=60)
    sender.group.close()


def test_a_trainer_that_is_shut_down_as_it_sends_tells_what_the_engine_says():
    reasons: list[str] = []
    trainer: Any = BroadcastTrainer.__new__(BroadcastTrainer)
    trainer._info = SimpleNamespace(timeout_s=60.0)
    group = SimpleNamespace(close=lambda: None, abort=reasons.append, ended=None)
    trainer._sender = SimpleNamespace(group=group, send=lambda *_: None)

    def update(*_: object, **__: object) -> None:
        trainer.shutdown()
        raise TransferFault("the engine has ended")

    named = list(tensors().items())
    with pytest.raises(TransferFault, match="the engine has ended"):
        trainer._send(TensorList.of(named), named, SimpleNamespace(update=update))
    assert reasons == ["the engine refused the update: the engine has ended"]


@pytest.mark.slow
def test_an_aborted_group_leaves_nothing_after_gloos_timeout():
    worker = engine()
    sender = connect(worker)
    sender.group.close()
    worker.shutdown()
    del sender
    before = open_things()
    sender = connect(worker, timeout_s=12.0)
    worker.timeout_s = 0.5
    with pytest.raises(TransferFault, match=r"waited 0\.5 s"):
        update(worker, tensors())
    sender.group.abort("has had enough")
    worker.shutdown()
    del sender
    names = {name for name, _ in open_things() - before}
    threads = {name for name in names if not name.isdecimal()}  # and no files
    assert threads == {"inflight-wire"}  # waits for gloo
    until(lambda: open_things() <= before)


def test_a_new_group_takes_the_place_of_the_old_one():
    worker = engine()
    old = connect(worker)
    new = connect(worker)
    transfer(worker, new, tensors())
    assert old.group.ended is None
    old.group.close()
    new.group.close()
    worker.shutdown()
