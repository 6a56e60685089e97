"""Long loops of the staging thread let other threads run."""

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from vllm.inflight.errors import Cause
from vllm.inflight.packed import SLICE_S
from vllm.inflight.tensor_names import nearest, paired, renaming
from vllm.inflight.update import Manifest, TensorSpec
from vllm.inflight.worker.verify.checks import MAX_TOLD, MOST_PAIRED, TensorChecks
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.parameter_map import ParameterMap
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint
from vllm.inflight.yielding import (
    SHORT_S,
    beside_decoding,
    break_if_due,
    resting_by,
    with_breaks,
)

pytestmark = pytest.mark.seconds

LONGEST_S = 0.01
"""Most seconds between two breaks if no tensor is rejected."""
LONGEST_OF_REFUSALS_S = 0.1
"""To make one list of 91,000 names, and throw all away, is no loop of ours."""

NAMES = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    for layer in range(61)
    for expert in range(497)
    for part in ("gate", "up", "down")
]


class Breaks:
    """Records how long a thread computes between two breaks."""

    def __init__(self) -> None:
        self.worked: list[float] = []
        self._since = time.thread_time()

    def __call__(self) -> None:
        now = time.thread_time()
        self.worked.append(now - self._since)
        self._since = time.thread_time()


def worked(act: Callable[[], object]) -> list[float]:
    gc.disable()  # what a collection costs is up to all that this process has
    try:
        breaks = Breaks()
        with resting_by(breaks):
            act()
        breaks()
    finally:
        gc.enable()
    return breaks.worked


def longest(prepared: Callable[[], Callable[[], object]]) -> float:
    """The longest that something new computes without a break, the best of three.

    Its beginning is allowed `SHORT_S` more.
    """

    def once() -> float:
        first, *others = worked(prepared())
        return max(first - SHORT_S, *others)

    return min(once() for _ in range(3))


def tensors(change: Callable[[str], str] = str) -> dict[str, TensorSpec]:
    names = map(change, NAMES)
    return {name: TensorSpec(name, (32, 64), "bfloat16") for name in names}


def inspection(manifest: Manifest) -> tuple[TensorChecks, ParameterMap]:
    known = dict.fromkeys(NAMES, ((32, 64), "bfloat16"))
    origin = StartCheckpoint(
        dict.fromkeys(NAMES, (32, 64)), dict.fromkeys(NAMES, "bfloat16")
    )
    made = TensorChecks(
        manifest,
        known,
        IgnoredTensors(),
        origin,
        asks_loader=False,
        allow_nonfinite=False,
    )
    return made, ParameterMap({name: [name] for name in NAMES}, origin)


def test_a_loop_rests_after_every_slice_and_gives_all_entries():
    def spin() -> list[int]:
        found = []
        for number in with_breaks(range(100)):
            until = time.thread_time() + SLICE_S / 4
            while time.thread_time() < until:
                pass
            found.append(number)
        return found

    assert spin() == list(range(100))
    assert 5 <= min(len(worked(spin)) for _ in range(5)) <= 20


def test_a_loop_in_another_thread_has_no_breaks():
    breaks = Breaks()
    with resting_by(breaks):
        other = threading.Thread(target=lambda: list(with_breaks(range(200_000))))
        other.start()
        other.join()
    list(with_breaks(range(200_000)))
    assert not breaks.worked


def test_consecutive_short_loops_have_breaks():
    def spin() -> None:
        for _ in range(160):
            for _ in with_breaks(range(1)):
                until = time.thread_time() + SLICE_S / 8
                while time.thread_time() < until:
                    pass
            break_if_due()

    assert 5 <= min(len(worked(spin)) for _ in range(5)) <= 20


def test_a_short_loop_has_no_break():
    def spin() -> None:
        until = time.perf_counter() + SHORT_S / 2
        while time.perf_counter() < until:
            list(with_breaks(range(10)))
            break_if_due()

    assert min(len(worked(spin)) for _ in range(5)) == 1  # of the test's own


def test_a_loop_that_mostly_waits_has_no_break():
    def wait() -> None:
        for _ in with_breaks(range(10)):
            time.sleep(SHORT_S)

    assert len(worked(wait)) == 1  # of the test's own


def test_an_error_that_ends_a_break_ends_the_loop():
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError), resting_by(stop):
        list(with_breaks(range(10**6)))


def interpreter() -> tuple[float, tuple[int, int, int]]:
    return sys.getswitchinterval(), gc.get_threshold()


def test_threads_switch_more_often_and_full_collections_are_deferred_beside_decoding():
    usual = interpreter()
    with beside_decoding():
        seconds, (*thresholds, full) = interpreter()
        assert seconds < usual[0]
        assert (*thresholds,) == usual[1][:2]
        assert full > 10**6 or sys.version_info >= (3, 14)
    assert interpreter() == usual


def test_the_last_of_several_threads_restores_the_interpreter_settings():
    usual = interpreter()
    first, second = beside_decoding(), beside_decoding()
    first.__enter__()
    meanwhile = interpreter()
    second.__enter__()
    first.__exit__(None, None, None)
    assert interpreter() == meanwhile
    second.__exit__(None, None, None)
    assert interpreter() == usual


def test_a_collection_threshold_that_others_set_meanwhile_is_kept():
    usual = gc.get_threshold()
    try:
        with beside_decoding():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold()[:2] == (500, 5)
        assert gc.get_threshold()[2] == 5 or sys.version_info >= (3, 14)
    finally:
        gc.set_threshold(*usual)


def test_collections_pass_the_specs_of_tensors_over():
    assert not gc.is_tracked(TensorSpec("name", (1, 2), "bfloat16"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(str, id="its own names"),
        pytest.param(lambda name: f"module.{name}", id="with a prefix"),
        pytest.param(
            lambda name: name.replace("experts", "expert_"),
            id="others",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda name: f"{hash(name)}", id="none", marks=pytest.mark.slow),
    ],
)
def test_a_manifest_of_91_000_names_is_judged_in_slices(change):
    announced = tensors(change)
    told = []

    def prepared() -> Callable[[], None]:
        # Each time anew: what is known of a model is worked out at its first update.
        looked, places = inspection(Manifest(tensors=announced))

        def judge() -> None:
            told.append(
                looked.problems_announced(
                    announced,
                    places,
                    lambda specs: [(set(), KeyError())] * len(specs),
                    are_all=True,
                )
            )

        return judge

    limit_s = LONGEST_S if change is str else LONGEST_OF_REFUSALS_S
    assert longest(prepared) < limit_s
    assert [rejection is None for rejection in told] == [change is str] * 3


def test_all_unmatched_names_are_reported_as_unknown_and_as_missing():
    announced = tensors(lambda name: f"{hash(name)}")
    looked, places = inspection(Manifest(tensors=announced))

    def ask(specs: Sequence[TensorSpec]) -> list[tuple[set[str], Exception | None]]:
        return [(set(), KeyError())] * len(specs)

    rejection = looked.problems_announced(announced, places, ask, are_all=True)
    assert rejection is not None
    assert set(rejection.named[Cause.UNKNOWN]) == set(announced)
    assert set(rejection.named[Cause.MISSING]) == set(NAMES)
    assert f"{2 * len(NAMES)} tensors of the update" in rejection.message
    assert f"and {len(NAMES) - MAX_TOLD} more" in rejection.message


def test_names_are_compared_in_slices():
    known = dict.fromkeys(NAMES, ((32, 64), "bfloat16"))
    strange = [f"module.{name}" for name in NAMES]
    shuffled = random.Random(0).sample(NAMES, MOST_PAIRED)
    sent = [(f"module.{name}", (32, 64), "bfloat16") for name in shuffled]
    for act in (
        lambda: nearest("model.norm.weight", None, None, known),
        lambda: renaming(strange, known),
        lambda: paired(sent, {name: known[name] for name in shuffled}),
    ):
        assert longest(lambda act=act: act) < LONGEST_OF_REFUSALS_S
        assert len(worked(act)) > 20
