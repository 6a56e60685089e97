"""Rows of a user's package make the calls of its own worker extension known."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import served
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import answers, call, publish
from tests.support.frameworks.core import extended_core
from tests.support.frameworks.own import WAYS
from vllm.inflight.errors import Conflict, EngineFault
from vllm.inflight.frameworks.table import known_calls

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.frameworks.own.Extension"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An installed package with an entry point that names the rows."""
    root = tmp_path_factory.mktemp("site")
    info = root / "tests_own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: tests-own\nVersion: 1.0\n")
    group = "[vllm_inflight.known_calls]\nown = tests.support.frameworks.own:ROWS\n"
    (info / "entry_points.txt").write_text(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        known_calls.cache_clear()
        yield
    known_calls.cache_clear()


@pytest.fixture(scope="module")
def booted(package: None, folders: dict[str, Path]) -> Iterator[EngineCore]:
    with extended_core(folders["old"], EXTENSION) as core:
        yield core
    gc.collect()


def test_a_users_own_call_becomes_a_version_and_its_result_is_returned(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    new = folders["new"]
    digest = publish(core, new, "new")["digest"]
    expected = answers(core, "expected")
    publish(core, folders["old"], "old")
    (result,) = core.collective_rpc("tests_push", kwargs={"folder": str(new)})
    assert result["path"] == new and len(result["loaded"]) == 25
    assert served(core)[2] == digest and answers(core, "after") == expected
    assert call(core, "info")["previous"]["weight_version"] == "old"


def test_what_stops_decoding_does_nothing_in_an_adopted_call(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    before = gc.get_stats()[2]["collections"]
    args = (str(folders["new"]),)
    assert core.collective_rpc("tests_push_calmly", args=args) == [(0, None)]
    assert gc.get_stats()[2]["collections"] == before
    gc.collect()  # in every other thread it does what it says
    assert gc.get_stats()[2]["collections"] == before + 1


def test_a_method_that_needs_the_thread_of_an_earlier_call_fails_and_changes_nothing(
    core: EngineCore,
) -> None:
    before, said = served(core), answers(core, "before")
    core.collective_rpc("tests_join")
    with pytest.raises(EngineFault, match=r"tests_push_from_here .* 'folder'"):
        core.collective_rpc("tests_push_from_here")
    assert served(core) == before and answers(core, "after") == said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("catches", [False, True], ids=["raises", "catches"])
def test_a_write_past_the_loader_is_rejected_by_name_and_changes_nothing(
    core: EngineCore, folders: dict[str, Path], way: str, catches: bool
) -> None:
    """It would be served under the digest of what was loaded."""
    publish(core, folders["new"], "new")
    publish(core, folders["old"], "old")
    before, said, held = served(core), answers(core, "before"), parameters(core)
    core.collective_rpc("tests_keep_model")
    told = str(folders["new"]), way, catches
    with pytest.raises(Conflict, match=r"the live model|of the shadow model") as raised:
        core.collective_rpc("tests_push_and_write", args=told)
    assert ("the live model" in way) == ("the live model" in str(raised.value))
    assert served(core) == before and answers(core, "after") == said
    assert parameters(core) == held
    assert call(core, "status")["active"] is None
    (result,) = core.collective_rpc("tests_push", args=(str(folders["new"]),))
    assert result["path"] == folders["new"]
    assert call(core, "rollback")["weight_version"] == "old"
    assert answers(core, "rolled back") == said
