"""The replay plan repeats what a loader did with a tensor, without the loader."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.inflight.worker.replay_plan import (
    Entry,
    Plan,
    RecordedWrites,
    replay,
    view_of,
    warm,
)
from vllm.inflight.worker.staging.coverage import Coverage, Fill


def recorded(loader, param, tensor):
    """The entry of one call of `loader`."""
    entry = Entry(tensor.shape, tensor.dtype)
    with RecordedWrites("p", param, tensor, entry):
        loader(param, tensor)
    return entry


def whole(param, tensor):
    param.data.copy_(tensor)


def second_shard(param, tensor):
    param.data.narrow(0, 4, 4).copy_(tensor.narrow(0, 2, 4))


def padded(param, tensor):
    param.data[: tensor.shape[0]].copy_(tensor)
    param.data[tensor.shape[0] :].fill_(0)


def turned(param, tensor):
    param.data.copy_(tensor.t())


def scaled(param, tensor):
    param.data.copy_(tensor * 2)


def added(param, tensor):
    param.data.copy_(tensor)
    param.data.add_(1)


def check_replay(loader, param_shape, tensor_shape):
    param = torch.nn.Parameter(torch.randn(param_shape), requires_grad=False)
    # Tensors of one bucket share its storage, each at its own place.
    bucket = torch.randn(2, *tensor_shape)
    entry = recorded(loader, param, bucket[1])
    plan = Plan()
    plan.keep("t", entry)
    again = torch.randn(3, *tensor_shape)[1]
    expected = torch.nn.Parameter(param.clone(), requires_grad=False)
    loader(expected, again)
    found = plan.entry("t", again)
    assert found is not None
    replay([(found, again)])
    assert torch.equal(param, expected)
    return entry


def test_copies_of_any_part_are_replayed_from_any_bucket():
    check_replay(whole, (8, 3), (8, 3))
    check_replay(second_shard, (8, 3), (9, 3))
    check_replay(turned, (3, 8), (8, 3))


def test_a_replay_fills_the_padding_again():
    entry = check_replay(padded, (8, 3), (5, 3))
    assert len(entry.filled) == 2


def test_a_tensor_that_its_loader_does_not_just_copy_is_not_replayed():
    for loader in (scaled, added):
        param = torch.nn.Parameter(torch.zeros(8, 3), requires_grad=False)
        tensor = torch.randn(8, 3)
        plan = Plan()
        plan.keep("t", recorded(loader, param, tensor))
        assert plan.entry("t", tensor) is None


def test_a_copy_from_another_tensor_of_the_bucket_is_not_recorded():
    param = torch.nn.Parameter(torch.zeros(8, 3), requires_grad=False)
    bucket = torch.randn(2, 8, 3)
    entry = Entry(bucket[0].shape, bucket.dtype)
    with RecordedWrites("p", param, bucket[0], entry):
        whole(param, bucket[1])
    assert not entry.is_whole


def test_a_tensor_of_another_form_is_not_replayed():
    param = torch.nn.Parameter(torch.zeros(8, 3), requires_grad=False)
    plan = Plan()
    plan.keep("t", recorded(whole, param, torch.randn(8, 3)))
    assert plan.entry("t", torch.randn(8, 3)) is not None
    assert plan.entry("t", torch.randn(3, 8)) is None
    assert plan.entry("t", torch.randn(8, 3).to(torch.bfloat16)) is None
    assert plan.entry("t", torch.randn(3, 8).t()) is None
    assert plan.entry("u", torch.randn(8, 3)) is None


def test_only_a_tensor_that_fills_one_contiguous_range_can_be_received_in_place():
    cases = {
        "whole": (whole, (8, 3), (8, 3), True),
        "padded": (padded, (8, 3), (5, 3), True),
        "part of it": (second_shard, (8, 3), (9, 3), False),
        "turned": (turned, (3, 8), (8, 3), False),
        "columns": (lambda p, t: p.data[:, :2].copy_(t), (8, 3), (8, 2), False),
    }
    for name, (loader, param_shape, shape, expected) in cases.items():
        param = torch.nn.Parameter(torch.zeros(param_shape), requires_grad=False)
        plan, entry = Plan(), recorded(loader, param, torch.randn(shape))
        plan.keep("t", entry)
        assert plan.place("t", shape, torch.float32) is None, "it was not proved"
        entry.is_proved = True
        assert (plan.place("t", shape, torch.float32) is not None) == expected, name
        assert plan.place("t", shape, torch.bfloat16) is None
        assert plan.place("t", (*shape, 1), torch.float32) is None


def test_a_converted_tensor_is_replayed_but_not_received_in_place():
    param = torch.nn.Parameter(torch.zeros(8, 3, dtype=torch.bfloat16), False)
    plan = Plan()
    tensor = torch.randn(8, 3)
    entry = recorded(whole, param, tensor)
    entry.is_proved = True
    plan.keep("t", entry)
    assert plan.entry("t", tensor) is not None
    assert plan.place("t", (8, 3), torch.float32) is None


def test_a_tensor_that_fills_nothing_is_not_kept():
    plan = Plan()
    tensor = torch.randn(8, 3)
    plan.keep("t", recorded(lambda *_: None, torch.zeros(8, 3), tensor))
    assert plan.entry("t", tensor) is None


@pytest.mark.parametrize("loader", [whole, padded])
def test_a_write_to_memory_that_was_set_aside_is_not_kept_for_a_replay(loader):
    param = torch.nn.Parameter(torch.empty(8, 4, device="meta"), requires_grad=False)
    tensor = torch.randn(8 if loader is whole else 6, 4)
    places, replays = Plan(is_replayed=False), Plan()
    for plan in (places, replays):
        plan.keep("t", recorded(loader, param, tensor))
    assert [len(places), len(replays)] == [1, 0]  # a place is known without memory


def test_what_an_update_that_was_not_whole_passed_over_is_not_known() -> None:
    """Its loader may have kept the tensor for one that did not come."""
    plan, nothing = Plan(), Entry(torch.Size([4]), torch.bfloat16)
    plan.keep("before", nothing)
    plan.confirm()
    plan.keep("kept", nothing)
    plan.keep("before", Entry(nothing.shape, nothing.dtype, is_whole=False))
    assert [*map(plan.passes_over, ("before", "kept"))] == [False, True]
    plan.drop_unconfirmed()
    assert [*map(plan.passes_over, ("before", "kept"))] == [True, False]


def test_a_view_is_described_by_its_place_in_the_storage():
    assert view_of(torch.zeros(4, 6)[1:, ::2]) == (6, (3, 3), (6, 2))


def test_tensors_of_several_dtypes_are_not_copied_in_one_call(monkeypatch):
    """On a GPU torch 2.11 reads and writes all targets of a call as the first one."""
    calls, together = [], torch._foreach_copy_

    def copy(targets, sources):
        calls.append(
            {(t.dtype, s.dtype) for t, s in zip(targets, sources, strict=True)}
        )
        together(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    kinds = (torch.float32, torch.bfloat16, torch.float16) * 2
    params = [torch.nn.Parameter(torch.zeros(8, 3, dtype=k), False) for k in kinds]
    tensors = [torch.randn(8, 3, dtype=torch.bfloat16) for _ in kinds]
    pairs = list(zip(params, tensors, strict=True))
    known = [(recorded(whole, p, torch.ones_like(t)), t) for p, t in pairs]
    replay(known)
    assert all(torch.equal(p, t.to(p.dtype)) for p, t in pairs)
    assert sorted(map(len, calls)) == [1, 1, 1]


def test_loaders_are_not_wrapped_until_one_is_called():
    model = torch.nn.Linear(3, 2, bias=False)
    own = whole
    model.weight.weight_loader = own
    coverage = Coverage(model, {"weight": model.weight.shape}, set())
    coverage.watch(lambda weights: None, at_once=False)
    assert model.weight.weight_loader is own
    coverage.watch_loaders()
    coverage.watch_loaders()
    with torch.no_grad():
        model.weight.weight_loader(model.weight, torch.ones(2, 3))
    assert coverage.short({"weight"}) == []
    coverage.unwatch()
    assert model.weight.weight_loader is own
    assert "load_weights" not in vars(model)


def test_missing_elements_are_counted_on_the_host():
    fill = Fill(12, {(0, (2, 3), (3, 1)): 6, (3, (5,), (1,)): 5})
    with torch.device("meta"):  # whatever device is the default of a thread
        assert Fill(12).missing == 12
        assert fill.missing == 4


@pytest.mark.parametrize(
    ("views", "missing"),
    [
        ([(0, (12,), (1,))], 0),
        ([(6, (2, 3), (3, 1)), (0, (6,), (1,))], 0),
        ([(1, (3, 3), (4, 1)), (0, (3, 1), (4, 1))], 0),
        ([(0, (2, 3), (3, 1)), (0, (6,), (1,))], 6),
        ([(0, (3, 2), (4, 1)), (1, (3, 2), (4, 1))], 3),
        ([(0, (2, 4), (4, 1)), (4, (1, 4), (4, 1))], 4),
        ([(0, (3, 2), (4, 1)), (1, (6,), (2,))], 3),
    ],
)
def test_overlapping_views_do_not_count_as_complete(views, missing):
    fill = Fill(12, {view: math.prod(view[1]) for view in views})
    assert sum(fill.views.values()) == 12
    assert fill.missing == missing


@pytest.mark.parametrize(
    ("loader", "shape", "num_unread"),
    [
        (whole, (8, 3), 0),
        (turned, (3, 8), 0),
        (padded, (6, 3), 0),
        (second_shard, (6, 3), 6),
        (lambda param, tensor: param.data.copy_(tensor[:8]), (16, 3), 24),
        (scaled, (8, 3), 0),  # nobody can tell
        (lambda param, tensor: param.data.zero_(), (8, 3), 0),
    ],
    ids=["whole", "turned", "padded", "a shard", "cut", "computed", "not used"],
)
def test_elements_that_a_loader_leaves_unread_are_counted(loader, shape, num_unread):
    entry = recorded(loader, torch.nn.Parameter(torch.zeros(8, 3)), torch.ones(shape))
    assert entry.num_unread == num_unread


def test_elements_that_are_read_twice_are_counted_once():
    def twice(param, tensor):
        for _ in range(2):
            param.data[:2].copy_(tensor[:2])

    entry = recorded(twice, torch.nn.Parameter(torch.zeros(8, 3)), torch.ones(4, 3))
    assert entry.num_unread == 6


class Copies(TorchDispatchMode):
    """Notes the dtypes of copies, and whether they are contiguous."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_copy_.default:
            (target,), (source,) = args
            self.seen.add((source.dtype, target.dtype, source.is_contiguous()))
        return func(*args, **(kwargs or {}))


def test_the_copies_of_a_first_update_have_run_before():
    """Of every dtype that may come, into every dtype that is served."""
    with Copies() as copies:
        warm(
            torch.device("cpu"),
            {torch.bfloat16, torch.float8_e4m3fn, torch.int32},
            {torch.float32, torch.bfloat16, torch.int32},
        )
    pairs = {
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int32, torch.int32),
    }
    assert copies.seen == {(*pair, whole) for pair in pairs for whole in (True, False)}
