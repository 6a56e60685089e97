"""The benchmark of frameworks' pauses: its rounds, its versions and its figures."""

from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.frameworks.pauses import (
    ABSORB,
    OBEY,
    are_same,
    at_once,
    figures,
    plans,
)
from benchmarks.frameworks.pauses_arm import SEQUENCES, UNPAUSED
from benchmarks.frameworks.pauses_worker import (
    Extension,
    buckets,
    names_of,
    tensors_of,
)
from benchmarks.frameworks.served import served_bits
from benchmarks.frameworks.trainer import write_files
from benchmarks.machine import GPUS
from benchmarks.record import Record, Update
from benchmarks.shapes import write_shape
from tests.support.frameworks.overview import FRAMEWORKS
from vllm.inflight.frameworks.known_call import methods_of
from vllm.inflight.frameworks.table import BUILT_IN, matched


def arm(name: str, stops_for: float) -> Any:
    """Tokens every 0.1 s; each update takes 1 s, and stops them for a while."""
    arrivals, updates, now = [], [], 0.0
    for _ in SEQUENCES:
        arrivals += [(now + n / 10, 1) for n in range(1, 51)]
        now += 5
        updates.append(Update(now, now + 1))
        arrivals += [(now + n / 10, 1) for n in range(1, 11) if n / 10 >= stops_for]
        now += 1
    arrivals += [(now + n / 10, 1) for n in range(1, 51)]
    record = Record([arrivals], 0.0, now + 5, updates)
    return SimpleNamespace(name=name, records=[record, record])


def test_each_framework_has_the_gaps_of_its_own_updates_in_both_arms() -> None:
    found = figures([arm(OBEY, 0.9), arm(ABSORB, 0.2)], SEQUENCES)
    assert list(found) == list(SEQUENCES)
    for by_arm in found.values():
        assert by_arm[OBEY]["gap_median_ms"] == pytest.approx(900)
        assert by_arm[ABSORB]["gap_max_ms"] == pytest.approx(200)
        assert by_arm[OBEY]["update_s"] == pytest.approx(1)


def test_an_arm_that_has_been_measured_alone_has_its_figures_already() -> None:
    found = figures([arm(OBEY, 0.9)], SEQUENCES)
    assert all(list(by_arm) == [OBEY] for by_arm in found.values())


def test_arms_share_no_gpu_at_the_same_time_and_share_the_cpu() -> None:
    assert at_once([]) == [{OBEY: {}, ABSORB: {}}]
    assert at_once(["3"]) == [{OBEY: {GPUS: "3"}}, {ABSORB: {GPUS: "3"}}]
    for gpus in (["4", "5"], ["4", "5", "6", "7"]):
        assert at_once(gpus) == [{OBEY: {GPUS: "4"}, ABSORB: {GPUS: "5"}}]


def test_every_update_of_all_rounds_brings_the_other_version() -> None:
    options = Namespace(
        streams=2, warm_tokens=1, steady=0.1, rounds=2, frameworks=SEQUENCES
    )
    found = plans(options, [Path("old"), Path("new")])
    assert len(found) == 3, "the first one warms up"
    updates = [each.partition("=") for plan in found for each in plan.checkpoints]
    assert [framework for framework, _, _ in updates] == [*SEQUENCES] * 3
    folders = [Path(folder).name for _, _, folder in updates]
    assert folders[0] == "new", "engines start with the old one"
    assert all(first != second for first, second in pairwise(folders))


@pytest.mark.parametrize("what", ["probe", "served"])
def test_arms_that_differ_after_a_round_are_told(what: str) -> None:
    obeying, absorbing = arm(OBEY, 0.9), arm(ABSORB, 0.2)
    obeying.records = [Record([], **{what: found}) for found in ([1, 2], [3, 4])]
    absorbing.records = [Record([], **{what: [1, 2]})]
    assert are_same([obeying, absorbing], what)
    absorbing.records.append(Record([], **{what: [3, 5]}))
    assert not are_same([obeying, absorbing], what)


def test_served_bits_tell_another_bit_and_another_place() -> None:
    model = torch.nn.Linear(40, 50).bfloat16()
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    flat = model.weight.data.view(-1)
    before, bits = served_bits(worker), flat.clone()
    flat[7] = -flat[7]
    assert served_bits(worker) != before
    flat.copy_(bits)
    assert served_bits(worker) == before
    flat[3], flat[9] = bits[9], bits[3]
    assert served_bits(worker) != before


def test_a_worker_holds_what_two_versions_share_once(tmp_path: Path) -> None:
    host = torch.device("cpu")
    versions = write_files(write_shape("tiny", tmp_path), host)
    first, second = (tensors_of(str(version), host) for version in versions)
    assert sorted(first) == sorted(names_of(str(versions[0])))
    assert {name for name in first if first[name] is not second[name]} == {
        "lm_head.weight"
    }
    assert torch.equal(first["lm_head.weight"], -second["lm_head.weight"])


@pytest.mark.parametrize("number", [1, 3, 4, 9])
def test_buckets_have_every_name_once(number: int) -> None:
    names = [str(each) for each in range(number)]
    found = list(buckets(names))
    assert len(found) <= 4
    assert [name for bucket in found for name in bucket] == names


def test_those_that_do_not_pause_come_last_and_are_those_of_the_overview() -> None:
    assert tuple(SEQUENCES)[-len(UNPAUSED) :] == UNPAUSED
    named = [each.without_pause for each in FRAMEWORKS if each.without_pause]
    assert tuple(named) == UNPAUSED
    paused = {each.pause for each in FRAMEWORKS if each.pause}
    assert paused == SEQUENCES.keys() - set(UNPAUSED)


def test_each_frameworks_worker_calls_are_known_ones() -> None:
    """An unknown call would end an absorbed pause; TRL's are vLLM's own."""
    known = matched(methods_of(Extension, BUILT_IN))
    assert {row.framework for row in known} >= SEQUENCES.keys() - {"TRL"}
    own = {name for name in vars(Extension) if not name.startswith("_")}
    assert own == {row.method for row in known}
