"""A pytest plugin: runs one shard, without what has passed; writes results at once."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.excerpt import excerpt


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, help="file of JSON lines for the results")
    parser.addoption("--passed", type=Path, help="JSON list of tests to leave out")
    parser.addoption("--shard", default="1/1", help="as 1/3, the first of three")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Keep a stretch of the tests, as pytest has put those of one engine together."""
    file = config.getoption("passed")
    passed = json.loads(file.read_text()) if file.is_file() else []
    shard, shards = map(int, config.getoption("shard").split("/"))
    left = [item for item in items if item.nodeid not in passed]
    own = left[len(left) * (shard - 1) // shards : len(left) * shard // shards]
    config.hook.pytest_deselected(items=[item for item in items if item not in own])
    items[:] = own


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call" or not report.passed:
        told = "" if report.passed else excerpt(report.longreprtext)
        line = {"id": item.nodeid, "outcome": report.outcome, "told": told}
        line["seconds"] = round(report.stop - report.start)
        with item.config.getoption("lines").open("a") as out:
            out.write(json.dumps(line) + "\n")
    return report
