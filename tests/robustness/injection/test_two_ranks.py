"""The same on two tensor-parallel ranks: all of them change, or none does."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.robustness.injection.cells import TWO_RANKS, Cell, params
from tests.robustness.injection.subject import Subject
from tests.support.engines.oracle import Oracle
from tests.support.engines.probe import begin_from_files
from vllm.inflight.errors import InflightError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        extension = "tests.robustness.injection.test_two_ranks.Extension"
        yield {"tensor_parallel_size": 2, "worker_extension_cls": extension}


class Extension(Oracle):
    """A method of somebody else, which may fail on a rank."""

    def tests_fail_on(self: Any, rank: int) -> int:
        if self.rank == rank:
            raise ValueError("a method of the user's own failed")
        return int(self.rank)

    def tests_is_frozen(self: Any) -> bool:
        """Whether collections of garbage pass over the model."""
        gc.collect()
        return not any(each is self.model_runner.model for each in gc.get_objects())


@pytest.mark.parametrize("cell", params(*TWO_RANKS))
def test_both_ranks_serve_one_whole_version_and_the_next_update_works(
    subject: Subject, cell: Cell
) -> None:
    subject.survives(cell)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_that_fails_on_one_rank_leaves_no_answer_for_the_next_call(
    subject: Subject, rank: int
) -> None:
    # In the middle of an update: the next that is waited for is its flip.
    llm = subject.llm
    for _ in range(2):
        begin_from_files(llm)
        with pytest.raises((RuntimeError, InflightError), match="of the user's own"):
            llm.collective_rpc("tests_fail_on", args=(rank,))
        llm.abort_weight_update()
        with pytest.raises((RuntimeError, InflightError), match="of the user's own"):
            llm.collective_rpc("tests_fail_on", args=(rank,))
        assert llm.collective_rpc("tests_fail_on", args=(7,)) == [0, 1]
    subject.changes()


def test_objects_made_at_startup_are_excluded_from_garbage_collection(
    subject: Subject,
) -> None:
    """Half a second of it would come between two steps while an update is staged."""
    assert all(subject.llm.collective_rpc("tests_is_frozen"))
