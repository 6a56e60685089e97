"""Which parts of a delta are written together on a GPU: as many as memory allows.

No kernel runs here: what is looked at is decided on the host.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from tests.support.deltas import random_bits, scattered, with_changes
from tests.unit.worker.test_device_writer import copied, entry
from vllm.inflight.delta import Encoder, Part, compression
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.worker.delta.device_writer import DeviceWriter, own_place
from vllm.inflight.worker.delta.targets import Targets
from vllm.inflight.worker.shadow.change_log import ChangeLog

pytest.importorskip("triton", reason="Triton is not installed")

CPU = torch.device("cpu")
SIZE, MOST = 400_000, 700_000
"""Elements of a tensor; bytes that several parts may take."""


def parts_of(
    olds: Sequence[torch.Tensor], share: float, **options: object
) -> list[Part]:
    """The parts of a delta that changes this share of each tensor."""
    encoder, parts = Encoder(1 << 16, **options), list[Part]()
    for number, old in enumerate(olds):
        at = scattered(old.numel(), share)
        parts += encoder.add(number, old, with_changes(old, at, most=90))
    parts += encoder.finish()
    for part in parts:
        part.check([old.numel() for old in olds], [old.itemsize for old in olds])
    return parts


def writer_of(
    olds: Sequence[torch.Tensor], log: ChangeLog | None = None
) -> DeviceWriter:
    """A writer into a log, or into the tensors themselves as a second set."""
    live = {str(number): old for number, old in enumerate(olds)}
    places = [own_place(*each) for each in enumerate(olds)]
    return DeviceWriter(CPU, live, live if log is None else log, Targets.of(places))


def several(writer: DeviceWriter, parts: list[Part], most: int) -> Iterator[list[Part]]:
    """The batches that have more than one part; all parts come, in their order."""
    batches = [[*batch] for batch in writer.batches(parts, most)]
    assert [part for batch in batches for part in batch] == parts
    yield from (batch for batch in batches if len(batch) > 1)


def entries(batch: Sequence[Part]) -> int:
    return sum(int(part.rows["num_entries"].sum()) for part in batch)


def test_what_is_decoded_into_the_log_takes_no_other_memory():
    olds = [random_bits(torch.int16, SIZE) for _ in range(4)]
    parts = parts_of(olds, 0.3)
    writer = writer_of(olds, ChangeLog(CPU, 1 << 22))
    assert len(parts) > 2
    assert [*several(writer, parts, 0)] == [parts]


def test_memory_that_parts_are_decompressed_into_is_counted():
    olds = [torch.zeros(SIZE, dtype=torch.int16) for _ in range(8)]
    parts = parts_of(olds, 0.3, compress=3)
    plain = [part.plain_bytes for part in parts]
    assert all(plain) and sum(plain) > MOST > 2 * min(plain)
    batches = [*several(writer_of(olds, ChangeLog(CPU, 1 << 22)), parts, MOST)]
    assert batches
    for batch in batches:
        assert sum(part.plain_bytes for part in batch) <= MOST


@pytest.mark.parametrize("capacity", [1 << 10, 1 << 18])
def test_what_a_log_beside_the_weights_has_no_room_for_is_counted(capacity):
    """Host memory would be read and written once more, so it is decoded elsewhere."""
    olds = [random_bits(torch.int16, SIZE) for _ in range(4)]
    parts = parts_of(olds, 0.2)
    log = ChangeLog(CPU, capacity, 1 << 22)
    assert entries(parts) * 6 > MOST + log.room_beside_weights
    batches = [*several(writer_of(olds, log), parts, MOST)]
    assert batches
    for batch in batches:
        assert entries(batch) * 6 <= MOST + log.room_beside_weights


def test_with_two_sets_offsets_are_counted_as_bits_are():
    olds = [random_bits(torch.int8, SIZE) for _ in range(8)]
    parts = parts_of(olds, 0.2)
    batches = [*several(writer_of(olds), parts, MOST)]
    assert batches
    for batch in batches:
        assert entries(batch) * (4 + 1) <= MOST


def test_without_room_in_the_log_nothing_is_decompressed(monkeypatch):
    """What other ranks serve is not known then: no more is told than may be needed."""
    old = torch.zeros(64, 50, dtype=torch.int16)
    new = old.clone()
    new[:32] = 1
    encoder = Encoder(compress=3)
    (part,) = [*encoder.add(0, old, new), *encoder.finish()]
    part.check([old.numel()], [2])
    assert part.plain_bytes

    def decompress(*args: object) -> None:
        raise AssertionError("it was decompressed")

    monkeypatch.setattr(compression, "decompress", decompress)
    # All changes are of this rank, or none of them.
    for rows in (np.s_[:32], np.s_[32:]):
        live = {"w": torch.zeros(32, 50, dtype=torch.int16)}
        places = entry(old, copied(old, "w", old[rows], live["w"]))
        log = ChangeLog(CPU, 1 << 10)
        log.has_room = False  # an earlier part found none
        writer = DeviceWriter(CPU, live, log, Targets.of([places]))
        assert writer.write([part], None, Launches(CPU)) is None
        assert log.num_elements == 32 * 50
