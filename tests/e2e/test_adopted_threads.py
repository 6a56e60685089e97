"""Threads that an adopted method starts: they follow its rules, and end with it.

A thread may go on when the method has returned, when another client has aborted the
update, or at its deadline. The memory may have another version by then.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adopted_direct_writes import BUILDS
from tests.e2e.test_adopted_ends import in_thread
from tests.e2e.test_adoption import served, tensors_of
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import answers, call, publish
from tests.support.frameworks import threaded
from tests.support.frameworks.core import extended_core
from tests.support.frameworks.direct import NORM, TENSORS
from tests.support.frameworks.threaded import HELD, Held
from tests.support.waiting import until
from vllm.inflight.errors import Conflict, DeadlineExceeded, InflightError
from vllm.inflight.frameworks import table

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.frameworks.threaded.Threaded"


@pytest.fixture(scope="module", params=BUILDS)
def booted(
    request: pytest.FixtureRequest, folders: dict[str, Path]
) -> Iterator[EngineCore]:
    rows = (*threaded.ROWS, *table.BUILT_IN)
    with BUILDS[request.param](), pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "BUILT_IN", rows)
        table.known_calls.cache_clear()
        with extended_core(folders["old"], EXTENSION) as core:
            yield core
    table.known_calls.cache_clear()
    gc.collect()


@pytest.fixture
def held(folders: dict[str, Path]) -> Iterator[Held]:
    TENSORS["checkpoint"] = tensors_of(folders["new"])
    made = Held()
    HELD[:] = [made]
    yield made
    made.may_return.set()
    made.go_on()
    HELD.clear()
    TENSORS.clear()


@pytest.fixture
def expected(core: EngineCore, folders: dict[str, Path]) -> Any:
    """The digest, parameters and answer of the new weights; the old ones are served."""
    digest = publish(core, folders["new"], "new")["digest"]
    found = digest, parameters(core), answers(core, "expected")
    publish(core, folders["old"], "older")  # the second set has the old weights, too
    publish(core, folders["old"], "old")
    return found


def send(core: EngineCore, way: str) -> Any:
    return core.collective_rpc("tests_send", args=(way,))


def state(core: EngineCore) -> Any:
    return served(core)[2], parameters(core), answers(core, "now")


def test_tensors_that_a_thread_of_the_method_loads_become_a_version(
    core: EngineCore, held: Held, expected: Any
) -> None:
    assert send(core, "loads in a thread") == ["loads in a thread"]
    assert state(core) == expected


def test_a_pool_that_the_extension_keeps_loads_in_every_call(
    core: EngineCore, held: Held, folders: dict[str, Path], expected: Any
) -> None:
    for _ in range(2):
        assert send(core, "loads in a kept pool") == ["loads in a kept pool"]
        assert state(core) == expected
        publish(core, folders["old"], "old")


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("writes in a thread", NORM),
        ("writes in a pool", NORM),
        ("writes in a kept pool", NORM),
        ("writes in a thread of a thread", NORM),
        ("loads in two threads", "two threads at once"),
    ],
)
def test_what_a_thread_may_not_do_is_rejected_by_name_and_changes_nothing(
    core: EngineCore, held: Held, expected: Any, way: str, why: str
) -> None:
    """The thread has hidden the error, and the method has loaded every tensor."""
    before = served(core), state(core)
    with pytest.raises(Conflict) as raised:
        send(core, way)
    assert why in str(raised.value) and why in held.errors[0]
    assert held.num_written == 0
    assert (served(core), state(core)) == before
    assert send(core, "loads in a thread") and state(core) == expected


def test_a_thread_that_goes_on_after_a_commit_changes_no_version(
    core: EngineCore, held: Held, expected: Any
) -> None:
    old = state(core)
    assert send(core, "goes on") == ["goes on"]
    assert state(core) == expected
    held.go_on()
    assert held.num_written == 0 and len(held.errors) == 4
    for error in (held.errors[0], held.errors[-1]):
        assert "tests_send" in error and "after the method has returned" in error
    assert state(core) == expected
    assert call(core, "verify")["result"] == "equal"
    call(core, "rollback")
    assert state(core) == old


def test_a_thread_that_goes_on_during_the_next_update_leaves_it_alone(
    core: EngineCore, held: Held, folders: dict[str, Path], expected: Any
) -> None:
    send(core, "goes on")
    publish(core, folders["old"], "old")
    call(core, "start", transport="local")
    call(core, "receive", update_info={"path": str(folders["new"])})
    held.go_on()
    assert held.num_written == 0 and len(held.errors) == 4
    call(core, "prepare")
    call(core, "commit", weight_version="new")
    assert state(core) == expected
    assert call(core, "verify")["result"] == "equal"


def test_after_an_abort_by_another_client_threads_of_the_method_write_nothing(
    core: EngineCore, held: Held, folders: dict[str, Path], expected: Any
) -> None:
    before = served(core)
    result = in_thread(lambda: send(core, "writes for long"))
    assert held.has_begun.wait(30)
    call(core, "abort")
    assert served(core) == before
    held.may_return.set()
    assert isinstance(result(), InflightError)
    publish(core, folders["new"], "new")
    num_before = len(held.errors)
    assert state(core) == expected
    held.go_on()
    assert held.num_written == 0 and len(held.errors) > num_before
    assert state(core) == expected
    assert call(core, "verify")["result"] == "equal"


def test_after_an_abort_the_method_itself_writes_no_further_parameter(
    core: EngineCore, held: Held, folders: dict[str, Path], expected: Any
) -> None:
    """The next update waits for it."""
    result = in_thread(lambda: send(core, "writes slowly"))
    assert held.has_begun.wait(30)
    call(core, "abort")
    held.may_return.set()
    assert isinstance(result(), InflightError)
    publish(core, folders["new"], "new")
    assert held.num_written == 1
    assert state(core) == expected


def test_a_thread_of_one_part_that_writes_during_the_next_ends_the_version(
    core: EngineCore, held: Held, expected: Any
) -> None:
    before = served(core), state(core)
    names = list(TENSORS["checkpoint"])

    def part(names: list[str], way: str, *, is_last: bool) -> None:
        core.collective_rpc("tests_send_part", args=(names, way, is_last))

    part(names[:9], "writes later", is_last=False)
    held.go_on()
    with pytest.raises(Conflict, match="after the method has returned"):
        part(names[9:], "nothing more", is_last=True)
    assert (served(core), state(core)) == before
    part(names[:9], "nothing more", is_last=False)
    part(names[9:], "nothing more", is_last=True)
    assert state(core) == expected


def test_a_load_of_a_thread_that_does_not_end_ends_with_the_deadline_and_is_named(
    core: EngineCore,
    held: Held,
    folders: dict[str, Path],
    expected: Any,
) -> None:
    before = served(core), state(core)
    result = in_thread(lambda: send(core, "stops in its iterator"))
    assert held.has_begun.wait(30)
    active = core.vllm_inflight.updates.ledger.active

    def is_held() -> bool:
        (rank,) = call(core, "status", update_id=active.update_id)["ranks"]
        return "held_by" in rank

    until(is_held)
    active.deadline = 0.0
    error = result()
    assert isinstance(error, DeadlineExceeded)
    why = f"rank 0 waits for {held.threads[0].name}, a thread of tests_send, which is"
    assert why in str(error) and "tensors" in str(error)
    assert (served(core), state(core)) == before
    publish(core, folders["new"], "new")
    assert state(core) == expected
    held.go_on()
    assert held.num_written == 0 and "after the method has returned" in held.errors[0]
    assert state(core) == expected
    assert call(core, "verify")["result"] == "equal"
    call(core, "rollback")
    assert (served(core)[0], state(core)) == (before[0][0], before[1])


def test_an_abort_leaves_a_load_of_a_thread_that_does_not_end(
    core: EngineCore, held: Held, folders: dict[str, Path], expected: Any
) -> None:
    result = in_thread(lambda: send(core, "stops in its iterator"))
    assert held.has_begun.wait(30)
    call(core, "abort")
    assert isinstance(result(), InflightError)
    call(core, "start", transport="local")
    call(core, "receive", update_info={"path": str(folders["new"])})
    held.go_on()  # in the middle of the next update
    assert held.num_written == 0 and "after the method has returned" in held.errors[0]
    call(core, "prepare")
    call(core, "commit", weight_version="new")
    assert state(core) == expected
    assert call(core, "verify")["result"] == "equal"


@pytest.mark.parametrize("loader", ["load_weights", "weight_loader"])
def test_a_loader_that_an_older_thread_has_kept_loads_nothing_after_the_commit(
    core: EngineCore, held: Held, folders: dict[str, Path], expected: Any, loader: str
) -> None:
    """This thread is older than the call, so it does not belong to it."""
    old = state(core)
    assert send(core, "leaves its loaders") == ["leaves its loaders"]
    assert state(core) == expected
    with pytest.raises(InflightError):
        held.kept[loader]()
    assert state(core) == expected
    call(core, "start", transport="local")
    call(core, "receive", update_info={"path": str(folders["new"])})
    with pytest.raises(InflightError):
        held.kept[loader]()
    call(core, "prepare")
    call(core, "commit", weight_version="new")
    assert state(core) == expected
    publish(core, folders["old"], "old")
    send(core, "leaves its loaders")
    with pytest.raises(InflightError):
        held.kept[loader]()
    call(core, "rollback")
    assert state(core) == old
