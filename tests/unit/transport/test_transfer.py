"""What is sent arrives, byte by byte, over gloo."""

from __future__ import annotations

import pytest
import torch

from tests.support.transports.peers import (
    BUCKET_BYTES,
    PATIENT,
    Recorder,
    connect,
    digests,
    engine,
    host,
    open_sender,
    process,
    receiving,
    send,
    tensors,
    transfer,
    update,
)
from vllm.inflight.errors import Malformed
from vllm.inflight.transport.buckets.reassembly import Destination
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.seconds


@pytest.fixture
def worker():
    worker = engine()
    yield worker
    worker.shutdown()


def test_two_workers_get_every_byte_of_several_updates():
    seeds = [1, 2, 3]
    meeting = host(world_size=3)
    with (
        process(receiving, meeting.port, 1, 3, seeds) as first,
        process(receiving, meeting.port, 2, 3, seeds) as second,
    ):
        sender = open_sender(meeting, PATIENT)
        for seed in seeds:
            send(sender, tensors(seed))
            expected = digests(tensors(seed).items())
            assert first.pipe.recv() == expected
            assert second.pipe.recv() == expected
        sender.group.close()


def test_one_call_loads_a_whole_update(worker):
    sender = connect(worker)
    transfer(worker, sender, tensors(5))
    assert worker.model.num_calls == 1
    assert digests(worker.model.loaded.items()) == digests(tensors(5).items())
    sender.group.close()


@pytest.mark.parametrize("num_buckets", [1, 2, 5])
def test_a_transfer_works_with_any_number_of_buckets(worker, num_buckets):
    sender = connect(worker, num_buckets=num_buckets)
    for seed in (1, 2):
        transfer(worker, sender, tensors(seed))
        assert digests(worker.model.loaded.items()) == digests(tensors(seed).items())
    sender.group.close()


class Keeper:
    """A model that looks at its tensors only at the end, as a layerwise reload may."""

    def load_weights(self, weights):
        self.kept = [(name, tensor[...]) for name, tensor in weights]


def test_a_tensor_kept_by_the_model_keeps_its_bytes():
    worker = engine(Keeper())
    sender = connect(worker)
    transfer(worker, sender, tensors(7))
    first = worker.model.kept
    transfer(worker, sender, tensors(8))
    assert digests(first) == digests(tensors(7).items())
    assert digests(worker.model.kept) == digests(tensors(8).items())
    sender.group.close()
    worker.shutdown()


def test_buckets_are_reused_when_no_tensor_refers_to_them(worker):
    class Watcher(Recorder):
        def load_weights(self, weights):
            for name, tensor in weights:
                self.loaded[name] = tensor.clone()
                addresses.add(tensor.untyped_storage().data_ptr())

    addresses: set[int] = set()
    worker.model = Watcher()
    sender = connect(worker)
    # Three tensors to a bucket, so that the model has moved on when it is reused.
    named = {f"{i}": torch.full((250,), float(i)) for i in range(60)}
    transfer(worker, sender, named)
    assert len(addresses) == 3
    assert digests(worker.model.loaded.items()) == digests(named.items())
    sender.group.close()


def test_the_tensors_of_a_source_may_share_their_memory(worker):
    """A source that gathers may write each tensor where the last one was."""
    sender = connect(worker)
    memory = torch.empty(BUCKET_BYTES)

    class Reused(dict):
        def items(self):
            for i in range(20):
                yield f"{i}", memory.fill_(float(i))

    # To announce is to look at every tensor; from the source, that would write them.
    facts = {f"{i}": memory for i in range(20)}
    sending = in_background(lambda: send(sender, Reused(), **facts))
    update(worker, facts)
    sending.result(timeout=60)
    assert [int(t[0]) for t in worker.model.loaded.values()] == list(range(20))
    sender.group.close()


def test_an_update_may_be_empty(worker):
    sender = connect(worker)
    transfer(worker, sender, {"nothing": torch.empty(0)})
    assert list(worker.model.loaded) == ["nothing"]
    transfer(worker, sender, {})
    sender.group.close()


def test_a_group_survives_a_tensor_that_the_model_rejects(worker):
    class Refusing(Recorder):
        def load_weights(self, weights):
            next(iter(weights))
            raise LookupError("no such parameter")

    sender = connect(worker)
    model, worker.model = worker.model, Refusing()
    with pytest.raises(LookupError):
        transfer(worker, sender, tensors())
    worker.model = model
    transfer(worker, sender, tensors(9))
    assert digests(model.loaded.items()) == digests(tensors(9).items())
    sender.group.close()


class InPlace(Recorder):
    """A model that knows where its large tensors end up."""

    def __init__(self, named):
        super().__init__()
        self.places = {n: torch.empty_like(t) for n, t in named.items()}
        self.in_place: set[str] = set()

    def load_weights(self, weights):
        weights.into(lambda name, shape, dtype: Destination.of(self.places[name]))
        for name, tensor in weights:
            if tensor.data_ptr() == self.places[name].data_ptr():
                self.in_place.add(name)
            self.loaded[name] = tensor.clone()


def test_large_tensors_are_received_in_place(worker):
    def version(seed):
        random = torch.Generator().manual_seed(seed)
        return {
            "longer_than_two_buckets": torch.randn(5 << 19, generator=random),
            "small": torch.randn(64, generator=random),
            "large": torch.randn(1024, 300, generator=random),
            "last": torch.randn(3, generator=random),
        }

    worker.model = InPlace(version(0))
    sender = connect(worker, bucket_bytes=4 << 20)
    for seed in (1, 2):
        transfer(worker, sender, version(seed))
        assert digests(worker.model.loaded.items()) == digests(version(seed).items())
        assert worker.model.in_place == {"longer_than_two_buckets", "large"}
    sender.group.close()


@pytest.mark.parametrize("shape", [[10**18], [2**40, 2**40]])
def test_an_announcement_of_absurd_size_is_rejected_by_name_at_once(worker, shape):
    sender = connect(worker)
    told = {"names": ["small", "vast"], "dtype_names": ["float32"] * 2}
    info = worker.parse_update_info(told | {"shapes": [[3], shape]})
    receiving = in_background(lambda: worker.receive_weights(info))
    with pytest.raises(Malformed, match="'vast'"):
        receiving.result(timeout=60)
    sender.group.close()
