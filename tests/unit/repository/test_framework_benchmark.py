"""The benchmark of frameworks' own updates: what it compares."""

from typing import Any

from benchmarks.frameworks.__main__ import NUM_GPUS, WAYS, compared
from benchmarks.frameworks.arm import IN_PAUSE, WITHOUT_PAUSE
from benchmarks.frameworks.packages import OWN
from benchmarks.frameworks.trainer import SENDERS
from benchmarks.record import OURS, UPSTREAM


def figures(gap_ms: float) -> dict[str, Any]:
    names = "gap_update_median_ms", "gap_update_max_ms", "lost_s", "update_s"
    return dict.fromkeys(names, gap_ms)


def test_arms_are_compared_only_where_both_make_the_same_calls() -> None:
    arms = {
        f"{OURS}, {IN_PAUSE}": figures(50),
        f"{OURS}, {WITHOUT_PAUSE}": figures(10),
    }
    assert compared("openrlhf", arms) is None
    arms[f"{UPSTREAM}, {IN_PAUSE}"] = figures(200)
    assert set((compared("openrlhf", arms) or {}).values()) == {4.0}


def test_plain_vllm_is_never_updated_by_parts_while_it_decodes() -> None:
    """verl makes one call, which holds the engine; OpenRLHF makes one per parameter."""
    assert WAYS["openrlhf"][UPSTREAM] == (IN_PAUSE,)
    assert all(ways[OURS][0] == ways[UPSTREAM][0] for ways in WAYS.values())
    assert WAYS.keys() == NUM_GPUS.keys() <= SENDERS.keys() <= OWN.keys()
