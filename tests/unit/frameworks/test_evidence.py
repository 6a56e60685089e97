"""The table of what ran of known calls names rows, tests and versions that exist."""

from pathlib import Path

import pytest

from tests.support.frameworks import by_hand
from tests.support.frameworks.evidence import (
    AUGUST,
    BY_HAND,
    JUNE,
    SEEN,
    Evidence,
    evidence_of,
)
from vllm.inflight.frameworks.known_call import methods_of
from vllm.inflight.frameworks.table import BUILT_IN

TESTS = Path(__file__).parents[2]
EVERY = list(dict.fromkeys(each for found in SEEN.values() for each in found))


def test_every_entry_is_of_a_known_call() -> None:
    known = {(row.framework, row.method) for row in BUILT_IN}
    assert {key[:2] for key in SEEN} <= known
    for framework, method, parameters in SEEN:
        rows = [r for r in BUILT_IN if (r.framework, r.method) == (framework, method)]
        assert not parameters or parameters in [
            told for row in rows for told in (row.parameters, row.besides)
        ]


def test_every_known_call_has_run_in_a_test_that_exists() -> None:
    for row in BUILT_IN:
        for each in evidence_of(row):
            assert (TESTS / each.test).is_file(), each


@pytest.mark.parametrize("each", EVERY, ids=str)
def test_the_version_is_one_that_the_tests_install(each: Evidence) -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    of_repository = each.version in (AUGUST, JUNE)
    assert (each.of == BY_HAND) == (not each.version)
    assert of_repository or f"=={each.version})\n" in makefile or not each.version


def test_classes_written_by_hand_have_the_parameters_of_known_calls() -> None:
    """Those of the table are compared with the frameworks' files."""
    frameworks = {"PrimeRL": "prime-rl", "NemoRL": "NeMo-RL", "Roll": "ROLL"}
    for name, kind in vars(by_hand).items():
        if not isinstance(kind, type) or kind.__module__ != by_hand.__name__:
            continue
        start = next((s for s in frameworks if name.startswith(s)), name)
        framework = frameworks.get(start, start)
        rows = [row for row in BUILT_IN if row.framework == framework]
        methods = methods_of(kind, rows)
        for method in methods.keys() & {row.method for row in rows}:
            assert any(r.is_of(methods) for r in rows if r.method == method), method
