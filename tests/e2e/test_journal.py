"""An engine that is started again serves what was served before, if files have it."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.mixtures import MLP, part, said
from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.request import rate_limit
from vllm.inflight.api.request.rate_limit import RateLimit
from vllm.inflight.errors import (
    Conflict,
    TooManyUpdates,
    VersionConflict,
    WeightsMismatch,
)

pytestmark = pytest.mark.engine


@pytest.fixture
def restart(start: Callable[..., Any], old: Path, tmp_path: Path) -> Callable[..., Any]:
    """An engine on the old weights, in the place of the one before."""
    note = {"journal": str(tmp_path / "served.json")}

    def begin(**options: Any) -> Any:
        defaults = {"dtype": "float32", "additional_config": {"inflight": note}}
        return start(old, **(defaults | options))

    return begin


def served(llm: Any) -> tuple[Any, ...]:
    info = llm.weight_info()
    return info["weight_version"], info["step"], info["digest"], said(llm)


def test_a_restarted_engine_restores_the_journaled_version(
    restart: Callable[..., Any],
    checkpoint: Callable[..., Path],
    new: Path,
    tmp_path: Path,
) -> None:
    llm = restart()
    llm.update_weights_from_disk(str(checkpoint(2)), "left behind")
    llm.update_weights_from_disk(str(new), "new")
    mlp = part(checkpoint(2), MLP, tmp_path / "mlp")
    manifest = {"format": 1, "step": 7}
    llm.update_weights_from_disk(mlp, "mixed", subset=MLP, manifest=manifest)
    llm.update_weights_from_disk(str(checkpoint(2)), "taken back")
    llm.rollback_weights()
    before = served(llm)
    assert before[:2] == ("mixed", 7)
    llm = restart()
    assert served(llm) != before
    assert llm.restore_weights()["weight_version"] == "mixed"
    assert served(llm) == before
    assert llm.weight_info()["epoch"] == 2, "only what it takes is repeated"
    with pytest.raises(Conflict, match="'mixed' was committed since the start"):
        llm.restore_weights()


def test_a_journaled_folder_that_was_overwritten_is_not_restored(
    restart: Callable[..., Any],
    checkpoint: Callable[..., Path],
    new: Path,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(new, tmp_path / "latest")
    llm = restart()
    llm.update_weights_from_disk(str(folder), "new")
    shutil.copytree(checkpoint(2), folder, dirs_exist_ok=True)
    llm = restart()
    before = served(llm)
    with pytest.raises(WeightsMismatch, match="expect_digest is"):
        llm.restore_weights()
    assert served(llm) == before
    assert llm.weight_update_status()["active"] is None


def test_a_later_folder_that_was_written_over_leaves_the_one_before_it_served(
    restart: Callable[..., Any],
    checkpoint: Callable[..., Path],
    new: Path,
    tmp_path: Path,
) -> None:
    note = tmp_path / "served.json"
    llm = restart()
    llm.update_weights_from_disk(str(new), "new")
    whole = served(llm)
    mlp = part(checkpoint(2), MLP, tmp_path / "mlp")
    llm.update_weights_from_disk(mlp, "mixed", subset=MLP)
    until(lambda: '"mixed"' in note.read_text())
    part(checkpoint(3), MLP, tmp_path / "mlp")
    llm = restart()
    with pytest.raises(WeightsMismatch, match="expect_digest is"):
        llm.restore_weights()
    assert served(llm) == ("update-1", *whole[1:])
    until(lambda: '"update-1"' in note.read_text())
    (step,) = json.loads(note.read_text())["recipe"]
    assert step["path"] == str(new)
    llm = restart()
    assert llm.restore_weights()["weight_version"] == "update-1"
    assert served(llm) == ("update-1", *whole[1:])


def test_restoring_a_version_of_several_updates_counts_as_one_start(
    restart: Callable[..., Any],
    checkpoint: Callable[..., Path],
    new: Path,
    tmp_path: Path,
) -> None:
    llm = restart()
    llm.update_weights_from_disk(str(new), "new")
    mlp = part(checkpoint(2), MLP, tmp_path / "mlp")
    llm.update_weights_from_disk(mlp, "mixed", subset=MLP)
    before = served(llm)
    llm = restart()
    one_a_minute = partial(RateLimit(1).spend, "caller")

    def ask() -> Any:
        rate_limit.allowance.set(one_a_minute)  # as a route does
        return llm.restore_weights()

    assert copy_context().run(ask)["weight_version"] == "mixed"
    assert served(llm) == before
    with pytest.raises(TooManyUpdates):
        one_a_minute()


def test_a_version_committed_during_a_restore_is_not_overwritten(
    restart: Callable[..., Any],
    checkpoint: Callable[..., Path],
    new: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = restart()
    llm.update_weights_from_disk(str(new), "new")
    llm = restart()
    info = Control.info

    async def info_before_a_commit(control: Control) -> Any:
        told = await info(control)
        monkeypatch.setattr(Control, "info", info)
        llm.update_weights_from_disk(str(checkpoint(2)), "theirs")
        return told

    monkeypatch.setattr(Control, "info", info_before_a_commit)
    with pytest.raises(VersionConflict, match="the live version is 'theirs'"):
        llm.restore_weights()
    assert llm.weight_info()["weight_version"] == "theirs"


def test_a_journaled_version_from_a_transport_is_rejected_by_name(
    restart: Callable[..., Any], new: Path
) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    llm = restart(weight_transfer_config=WeightTransferConfig(backend="local"))
    llm.start_weight_update(weight_version="sent")
    llm.update_weights({"update_info": {"path": str(new)}})
    llm.finish_weight_update()
    with pytest.raises(Conflict, match="'sent' did not come from files"):
        restart().restore_weights()


def test_without_a_journal_nothing_is_restored(restart: Callable[..., Any]) -> None:
    with pytest.raises(Conflict, match="no --inflight-journal is configured"):
        restart(additional_config={}).restore_weights()


def test_a_server_that_was_killed_serves_what_it_served(
    old: Path, new: Path, tmp_path: Path
) -> None:
    note = tmp_path / "served.json"
    flags = ("--dtype", "float32", "--inflight-journal", str(note))
    body = {"path": str(new), "weight_version": "new"}
    with Server(old, *flags) as server:
        digest = server.post("/update_weights_from_disk", body)["digest"]
        until(lambda: '"new"' in note.read_text())
        os.killpg(server.pid, signal.SIGKILL)
    with Server(old, *flags) as server:
        info = server.client.get("/weight_info").json()
        assert (info["weight_version"], info["digest"]) == ("new", digest)
        assert server.client.post("/restore_weights").status_code == 409
