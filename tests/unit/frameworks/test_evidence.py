"""The table of what ran of known calls names rows, tests and versions that exist."""

from pathlib import Path

from tests.support.frameworks.evidence import PRIME_RL, SEEN, evidence_of
from vllm.inflight.frameworks.table import BUILT_IN

TESTS = Path(__file__).parents[2]


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


def test_the_versions_are_those_that_the_tests_install() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    for found in SEEN.values():
        for each in found:
            pinned = f"=={each.version}\n" in makefile
            assert not each.version or pinned or each.version == PRIME_RL, each
