"""One of two ranks fails at a call that the engine core waits for."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def seen(old: Path, new: Path) -> dict[str, Any]:
    return run_script("failing_ranks", old, new)


@pytest.mark.parametrize("call", ["reload", "sleep"])
def test_an_error_of_one_rank_keeps_its_type_its_code_and_its_text(
    seen: dict[str, Any], call: str
) -> None:
    text = "a transfer of a test has not let go"
    assert seen[call] == ["EngineFault", "engine_fault", text]


@pytest.mark.parametrize("call", ["reload", "sleep"])
def test_a_call_that_one_rank_rejects_changes_no_rank(
    seen: dict[str, Any], call: str
) -> None:
    assert seen[f"{call} has changed nothing"]


def test_layers_that_one_rank_cannot_restore_hold_decoding_until_an_update(
    seen: dict[str, Any],
) -> None:
    assert "of the extension" in seen["breaks off"][2]
    label, weights = seen["after breaking off"]
    assert label not in ("old", "new") and weights == "gone"
    kind, code, text = seen["goes on"]
    assert (kind, code) == ("EngineAsleep", "engine_asleep") and "not put back" in text
    assert seen["healed"] == [["new again", "live"], seen["new"]]
