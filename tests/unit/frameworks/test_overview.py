"""The overview of frameworks names calls, tests, pages and versions that exist."""

from pathlib import Path

from tests.support.frameworks.evidence import EXTENSION
from tests.support.frameworks.overview import FRAMEWORKS
from vllm.inflight.frameworks.table import BUILT_IN

ROOT = Path(__file__).parents[3]


def test_every_framework_of_the_known_calls_is_in_it() -> None:
    names = [each.name for each in FRAMEWORKS]
    assert {row.framework for row in BUILT_IN} <= set(names)
    assert len(set(names)) == len(names)


def test_each_has_a_page_a_promise_and_something_that_ran_in_a_test() -> None:
    for each in FRAMEWORKS:
        assert each.promised and each.evidence, each.name
        for ran in each.evidence:
            assert (ROOT / "tests" / ran.test).is_file(), ran
    pages = {page.stem for page in (ROOT / "docs" / "frameworks").iterdir()}
    assert pages == {each.page for each in FRAMEWORKS}


def test_the_release_is_the_one_that_ran() -> None:
    for each in FRAMEWORKS:
        own = {ran.version for ran in each.evidence if EXTENSION in ran.of}
        assert own <= {each.release, each.besides}, each.name


def test_each_has_a_gap_at_an_update_or_a_reason_why_none_was_measured() -> None:
    for each in FRAMEWORKS:
        told = [each.pause, each.without_pause, each.no_gap, each.name == "verl"]
        assert sum(map(bool, told)) == 1, each.name


def test_what_is_promised_follows_from_the_known_calls() -> None:
    promised = {each.name: each.promised for each in FRAMEWORKS}
    assert promised["OpenRLHF"] == "transaction, adopted"
    assert promised["verl"] == "transaction, adopted"
    assert promised["prime-rl"].endswith("of workers with `apply_transfer_plan`")
    assert "in place: `nccl_reshard_refit`" in promised["NeMo-RL"]
    assert "adopted" not in promised["TRL"] + promised["slime"]
