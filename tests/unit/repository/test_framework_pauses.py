"""The benchmark of frameworks' pauses: how its figures come from the records."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.frameworks.pauses import ABSORB, OBEY, figures
from benchmarks.frameworks.pauses_arm import SEQUENCES
from benchmarks.record import Record, Update


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
    found = figures([arm(OBEY, 0.9), arm(ABSORB, 0.2)])
    assert list(found) == list(SEQUENCES)
    for by_arm in found.values():
        assert by_arm[OBEY]["gap_median_ms"] == pytest.approx(900)
        assert by_arm[ABSORB]["gap_max_ms"] == pytest.approx(200)
        assert by_arm[OBEY]["update_s"] == pytest.approx(1)
