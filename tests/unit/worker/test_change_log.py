"""Two logs in one memory: the way back, and the update that is logged beside it."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.unit.worker.test_swap import (
    CPU,
    are_equal,
    bits_of,
    logged,
    parameters,
)
from vllm.inflight.errors import Cancelled
from vllm.inflight.worker.shadow import change_log
from vllm.inflight.worker.shadow.change_log import ChangeLog, Keeping, notes_bytes
from vllm.inflight.worker.shadow.log_entries import LogEntries
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.shadow.swap import Swap


def never(*_: object) -> None:
    pytest.fail("there is room for both")


BESIDE = Keeping(never, never, never)
"""Of an update that is not in the way of the way back."""


def add_some(log: ChangeLog, live: dict[str, torch.Tensor], num: int) -> None:
    """Log changes that no other call logs."""
    name, param = next(iter(live.items()))
    at = torch.arange(num)
    log.add(name, at, bits_of(param)[at], bits_of(param)[at] + 1)


def test_the_way_back_outlives_an_update_that_is_logged_beside_it():
    live = parameters()
    old = {name: bits_of(param).clone() for name, param in live.items()}
    log, new = logged(live)
    swap = Swap(log, live)
    swap()
    log.holds_way_back = True
    for num in (2000, 700, 2900):
        log.begin(BESIDE)
        add_some(log, live, num)
        assert log.keeps and log.num_elements == num
        swap()
        assert are_equal(live, old)
        swap()
        assert are_equal(live, new)


@pytest.mark.parametrize(
    ("capacity", "num_bytes"),
    [
        (64, 8),
        (4097, 512),
        (1 << 20, 1 << 17),
        (1 << 26, 1 << 21),
        (3 << 28, 6 << 20),
        (1 << 34, 1 << 23),
    ],
)
def test_a_log_has_notes_of_a_128th_of_it(capacity: int, num_bytes: int) -> None:
    """A small one has some more, and a large one no more than are of use."""
    assert notes_bytes(capacity) == num_bytes
    if capacity < 1 << 21:
        assert 2 * len(ChangeLog(CPU, capacity).take_notes()) == num_bytes


def test_a_stream_that_takes_the_notes_waits_for_the_one_that_had_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            waits.append((self.name, other.name))

    log, a, b = ChangeLog(CPU, 1 << 20), Stream("a"), Stream("b")
    log.device = torch.device("cuda")
    for stream in (a, a, b, b, a):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, s=stream: s)
        log.take_notes()
    assert waits == [("b", "a"), ("a", "b")]


def test_notes_are_memory_of_their_own_which_the_log_gives_back_with_its_own() -> None:
    log = ChangeLog(CPU, 1 << 20)
    log.take_notes().fill_(-1)
    space = log.reserve("w", (1 << 20) // 8, 4)  # all of it
    assert space is not None
    space.offsets.zero_()
    space.bits.zero_()
    assert len(log.take_notes()) == 1 << 16 and (log.take_notes() == -1).all()
    assert log.allocated_bytes == (1 << 20) + (1 << 17)
    log.free()
    assert not len(log.take_notes())
    log.allocate()
    assert len(log.take_notes()) == 1 << 16


def test_the_budget_of_the_kv_cache_counts_the_notes() -> None:
    shadow = object.__new__(ShadowModel)
    shadow.module, shadow.arenas = torch.nn.Module(), ()
    shadow.device, shadow.log = torch.device("cuda"), ChangeLog(CPU, 1 << 20)
    assert shadow.copied_bytes == (1 << 20) + (1 << 17)
    assert shadow.staging_bytes == 1 << 20


@pytest.mark.parametrize("num_kept", [0, 1000])
def test_the_way_back_is_kept_where_to_give_it_up_would_not_help(num_kept: int):
    live = parameters()
    log = ChangeLog(CPU, 1 << 14)
    add_some(log, live, num_kept)
    log.holds_way_back = True
    log.begin(BESIDE)
    assert log.reserve(next(iter(live)), 1 << 14, 4) is None
    assert log.keeps and not log.has_room


@pytest.mark.parametrize("num_before", range(3))
def test_an_update_has_all_of_the_log_once_the_way_back_is_given_up(num_before: int):
    live = parameters()
    log = ChangeLog(CPU, 1 << 14)
    for number in range(num_before):  # from one end and from the other one
        log.begin(Keeping(log.drop_kept, never, never))
        add_some(log, live, 1000 + number)
        log.holds_way_back = True
    add_some(log, live, 1000)
    dropped: list[bool] = []

    def give_up() -> None:
        dropped.append(True)
        log.drop_kept()

    log.holds_way_back = True
    log.begin(Keeping(give_up, never, never))
    name = next(iter(live))
    spaces = [log.reserve(name, 400, 4) for _ in range(5)]
    assert dropped == [True] and not log.keeps
    assert log.num_bytes == 5 * 3200 <= 1 << 14
    ends = sorted(
        (space.offsets.data_ptr(), space.bits.data_ptr() + space.bits.nbytes)
        for space in spaces
        if space is not None
    )
    assert len(ends) == 5
    assert all(one[1] <= two[0] for one, two in pairwise(ends))
    assert log.reserve(name, 400, 4) is None


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory comes in blocks that hold few stretches, and is moved in slices."""
    monkeypatch.setattr(change_log, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(change_log, "MOVE_BYTES", 1 << 9)


class Served:
    """Parameters that were committed from a log, and how they are swapped back."""

    def __init__(self, capacity: int = 3 << 13, host_capacity: int = 1 << 18) -> None:
        self.live = parameters()
        self.old = {name: bits_of(param).clone() for name, param in self.live.items()}
        self.log, self.new = logged(self.live, capacity, host_capacity)
        self.log.require_room()
        self.swap = Swap(self.log, self.live)
        self.swap()
        self.log.holds_way_back = True
        self.rested: list[int] = []
        self.num_moves = self.num_given_up = 0

    def begin(self) -> None:
        self.log.begin(Keeping(self.give_up, self.rested.append, self.moved))

    def moved(self, entries: LogEntries) -> None:
        self.swap = self.swap.of(entries)
        self.num_moves += 1

    def give_up(self) -> None:
        self.num_given_up += 1
        self.log.drop_kept()

    def log_noise(self, num: int) -> None:
        """Log so many elements of any content."""
        add_some(self.log, self.live, num)
        for stretch in self.log.entries.stretches:
            stretch.offsets.fill_(-1)
            stretch.bits.fill_(-1)

    def commit_next(self, num: int) -> None:
        """Log and commit another update, of so many elements of each parameter."""
        self.begin()
        for name, param in self.live.items():
            at = torch.arange(num, 2 * num)
            self.log.add(name, at, bits_of(param)[at], bits_of(param)[at] + 1)
        self.require_way_back()
        self.old = {name: bits_of(param).clone() for name, param in self.live.items()}
        self.swap = Swap(self.log, self.live)
        self.swap()
        self.new = {name: bits_of(param).clone() for name, param in self.live.items()}
        self.log.holds_way_back = True

    @property
    def kept(self) -> LogEntries:
        """The way back, while an update is logged beside it."""
        assert self.log.keeps and self.log._kept is not None
        return self.log._kept

    @property
    def moved_bytes(self) -> int:
        """Bytes of the way back that lie in host memory."""
        pieces = zip(self.kept.memory, self.is_beside(self.kept), strict=True)
        return sum(len(memory) for memory, is_beside in pieces if not is_beside)

    def require_way_back(self) -> None:
        """It leads there and back."""
        for bits in (self.old, self.new):
            self.swap()
            assert are_equal(self.live, bits)

    def is_beside(self, entries: LogEntries) -> list[bool]:
        """Of all pieces, whether they lie beside the weights."""
        assert self.log._memory is not None
        return [self.log._memory.has(memory) for memory in entries.memory]


@pytest.mark.usefixtures("blocks")
def test_where_both_find_no_room_the_way_back_moves_and_the_update_does_not():
    served = Served()
    log, num_bytes = served.log, served.log.num_bytes
    assert all(served.is_beside(log.entries)) and not log.host_bytes
    served.begin()
    for _ in range(3):
        served.log_noise(1000)
    lack = num_bytes + log.num_bytes - log.capacity
    assert lack > 0 and log.capacity >= log.num_bytes
    assert all(served.is_beside(log.entries))
    assert served.num_moves == 1 and not served.num_given_up
    # As much as an update of the same size needs; no stretch is cut.
    beside = served.is_beside(served.kept)
    assert beside == sorted(beside, reverse=True) and any(beside)
    longest = max(map(len, served.kept.memory))
    needed = max(lack, 2 * num_bytes - log.capacity)
    assert lack <= served.moved_bytes < needed + longest
    assert served.moved_bytes <= log.host_bytes < num_bytes and len(log._blocks) > 1
    # A few slices at a time, and no byte is given out before it is copied.
    assert served.rested == sorted(served.rested)
    assert served.rested[-1] == served.moved_bytes and len(served.rested) > 10
    served.require_way_back()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("num_before", [0, 1], ids=["at one end", "at the other"])
def test_for_an_update_that_grows_the_way_back_moves_as_it_is_in_the_way(
    num_before: int,
):
    served = Served()
    for _ in range(num_before):
        served.commit_next(600)
    log, num_bytes = served.log, served.log.num_bytes
    served.begin()
    served.num_moves = 0
    served.rested.clear()
    moved = set()
    while log.num_bytes + 800 <= log.capacity:
        assert log.reserve(next(iter(served.live)), 100, 4) is not None
        assert all(served.is_beside(log.entries))
        moved.add(served.moved_bytes)
        assert num_bytes - served.moved_bytes + log.num_bytes <= log.capacity
        served.require_way_back()
    assert served.num_moves == len(moved) - 1 > 1
    assert served.num_moves <= change_log.LEAST_MOVED + 1
    # The thread that rests is told of all of them.
    assert served.rested == sorted(served.rested)
    assert served.rested[-1] == served.moved_bytes


@pytest.mark.usefixtures("blocks")
def test_where_the_host_has_little_room_no_more_moves_than_is_missing():
    served = Served(host_capacity=1 << 13)
    log, num_bytes = served.log, served.log.num_bytes
    assert 2 * num_bytes - log.capacity > 1 << 13  # what would be expected
    served.begin()
    served.log_noise(1200)
    served.log_noise(600)
    assert num_bytes + log.num_bytes > log.capacity
    assert all(served.is_beside(log.entries)) and served.num_moves == 1
    served.require_way_back()


@pytest.mark.usefixtures("blocks")
def test_after_an_update_that_was_aborted_the_next_one_has_all_beside_the_weights():
    served = Served()
    for _ in range(3):
        served.begin()
        for _ in range(3):
            served.log_noise(1000)
        assert all(served.is_beside(served.log.entries))
        served.require_way_back()
    assert served.num_moves == 1


@pytest.mark.usefixtures("blocks")
def test_over_many_updates_the_host_memory_does_not_grow():
    served = Served()
    log, seen = served.log, set()
    for number in range(6):
        served.commit_next(700)
        # The first one is larger than the one before.
        assert served.num_moves == number + 2
        assert all(served.is_beside(log.entries))
        seen.add(log.host_bytes)
    assert len(seen) <= 2 and max(seen) <= 2 * log.capacity


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("point", ["rest", "moved"])
def test_a_move_that_breaks_off_leaves_the_way_back_where_it_was(point: str):
    served = Served()
    log = served.log

    def end(*_: object) -> None:
        raise Cancelled("the update was aborted")

    keeping = Keeping(served.give_up, served.rested.append, served.moved)
    log.begin(keeping._replace(**{point: end}))
    with pytest.raises(Cancelled):
        for _ in range(3):
            served.log_noise(1000)
    assert log.keeps and log._kept is not None and all(served.is_beside(log._kept))
    assert all(block.is_empty for block in log._blocks)
    served.require_way_back()
    served.begin()  # and the next one moves it
    for _ in range(3):
        served.log_noise(1000)
    assert served.num_moves == 1
    served.require_way_back()


@pytest.mark.usefixtures("blocks")
def test_where_the_host_has_no_room_for_the_way_back_the_update_goes_on_there():
    served = Served(host_capacity=1 << 12)
    log = served.log
    served.begin()
    while not log.host_bytes:
        served.log_noise(300)
    assert served.is_beside(log.entries)[-1] is False
    assert log.keeps and not served.num_moves and not served.rested
    served.require_way_back()
    while log.has_room and not served.num_given_up:
        served.log_noise(300)
    assert not log.keeps and log.has_room
    assert served.is_beside(log.entries)[-1] is True


@pytest.mark.usefixtures("blocks")
def test_room_that_is_in_pieces_too_short_for_a_stretch_is_no_room():
    served = Served(host_capacity=1 << 15)
    log, name = served.log, next(iter(served.live))
    longest = max(map(len, log.entries.memory))
    assert longest > 1 << 12
    served.begin()
    while log.host_bytes < log.host_capacity:  # of each block most is taken
        block = log._new_block(1 << 12)
        assert block is not None and block.take(1 << 10) is not None
        log._blocks.append(block)
    for _ in range(4):
        assert log.reserve(name, 500, 1) is not None
    assert False in served.is_beside(log.entries)
    assert not served.num_moves and log.keeps
    assert not any(block.num_kept for block in log._blocks)
    served.require_way_back()


@pytest.mark.usefixtures("blocks")
def test_an_update_that_alone_is_larger_goes_on_in_host_memory_after_the_way_back():
    served = Served()
    log = served.log
    served.begin()
    for _ in range(8):
        served.log_noise(700)
    assert log.num_bytes > log.capacity and served.moved_bytes
    beside = served.is_beside(log.entries)
    assert True in beside and beside == sorted(beside, reverse=True)
    served.require_way_back()
    # The part of it that lies in host memory stays there when the rest is moved.
    served.swap = Swap(log, served.live)
    parts = [
        (each.offsets.clone(), each.bits.clone()) for each in log.entries.stretches
    ]
    log.holds_way_back = True
    in_host = [memory.data_ptr() for memory in log.entries.memory][sum(beside) :]
    num_moves = served.num_moves
    served.begin()
    log.reserve(next(iter(served.live)), 700, 1)
    assert served.num_moves == num_moves + 1
    found = served.kept.stretches
    assert [each.data_ptr() for each in served.kept.memory][-len(in_host) :] == in_host
    for (offsets, bits), each in zip(parts, found, strict=True):
        assert torch.equal(each.offsets, offsets) and torch.equal(each.bits, bits)


@pytest.mark.usefixtures("blocks")
def test_stretches_whose_memory_was_taken_at_once_move_and_none_of_them_is_cut():
    log = ChangeLog(CPU, 1 << 15, 1 << 18)
    counts = np.array([0, 5, 800, 300, 0, 1500, 2, 900, 0], dtype=np.int64)
    widths = np.array([2, 1, 2, 4, 8, 1, 2, 8, 4], dtype=np.int64)
    params = [f"w{number}" for number in range(len(counts))]
    assert log.reserve_all(params, counts, widths) is not None
    assert len(log.entries.pieces) == 1
    for seed, stretch in enumerate(log.entries.stretches):
        stretch.offsets.random_(generator=torch.Generator().manual_seed(seed))
        stretch.bits.random_(generator=torch.Generator().manual_seed(seed + 50))
    before = log.entries
    kept = [(each.offsets.clone(), each.bits.clone()) for each in before.stretches]
    moved: list[LogEntries] = []
    log.holds_way_back = True
    log.begin(Keeping(never, lambda num_bytes: None, moved.append))
    # So are these, which find room at once as soon as it has moved.
    num = 1200
    reserved = log.reserve_all(params[:3], np.full(3, num), np.array([8, 4, 2]))
    assert reserved is not None and len(log.entries.pieces) == 1
    (entries,) = moved
    assert len(entries.pieces) > 2
    for one, other, kept_bits in zip(
        before.stretches, entries.stretches, kept, strict=True
    ):
        assert one[:2] == other[:2] and one.first == other.first
        assert torch.equal(other.offsets, kept_bits[0])
        assert torch.equal(other.bits, kept_bits[1])
    params_of, rows = entries.table(5)
    assert tuple(params_of) == tuple(params)
    spans = sorted(
        (row[0], row[1] + row[2] * row[4]) for row in rows.tolist() if row[2]
    )
    assert all(one[1] <= two[0] for one, two in pairwise(spans))


@pytest.mark.usefixtures("blocks")
def test_both_lie_in_host_memory_side_by_side():
    served = Served(capacity=4096)
    log, num_bytes = served.log, served.log.host_bytes
    assert num_bytes
    for num in (900, 400, 700):
        served.begin()
        for _ in range(4):
            served.log_noise(num)
    assert num_bytes < log.host_bytes <= 1 << 18
    assert served.num_moves == 1 and not served.num_given_up
    served.require_way_back()
