"""The rollback target is dropped when an update writes its first byte over it.

Until then whatever goes wrong leaves the way back: a path, a manifest, a trainer that
thinks better of it.
"""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import call, publish, stage
from tests.support.engines.core_door import Door, said
from tests.support.engines.standing_receive import standing
from tests.support.waiting import until
from vllm.inflight.worker.staging.worker import StagingWorker

pytestmark = pytest.mark.engine


@pytest.fixture
def old_says(core: EngineCore) -> dict[str, list[int]]:
    return said(core)


@pytest.fixture
def served_new(
    core: EngineCore, folders: dict[str, Path], old_says: dict[str, list[int]]
) -> EngineCore:
    """The core on the new weights, with the old ones to go back to."""
    publish(core, folders["new"], "new")
    assert previous(core) == "old"
    return core


def previous(core: EngineCore) -> str | None:
    before = call(core, "info")["previous"]
    return before and before["weight_version"]


def is_told(ranks: Any) -> bool:
    """Whether the rank has done, or refused, all its commands."""
    (status,) = ranks.statuses()
    return bool(status.orders or status.state == "failed")


def goes_back(core: EngineCore, expected: dict[str, list[int]]) -> None:
    """A rollback serves the old weights, token for token, and the next the new ones."""
    assert call(core, "rollback")["weight_version"] == "old"
    assert said(core) == expected
    assert call(core, "rollback")["weight_version"] == "new"


def no_such_folder(folder: Path) -> Path:
    return folder / "nowhere"


def empty_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def cut_off(folder: Path) -> Path:
    """The last of its files ends before its header does."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    save_file({n: tensors[n] for n in names[:5]}, folder / "a.safetensors")
    save_file({n: tensors[n] for n in names[5:]}, folder / "b.safetensors")
    whole = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(whole[:100])
    return folder


def another_model(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    return folder


@pytest.mark.parametrize(
    "spoilt", [no_such_folder, empty_folder, cut_off, another_model]
)
def test_a_folder_that_cannot_be_read_keeps_the_rollback_target(
    served_new: EngineCore,
    folders: dict[str, Path],
    old_says: dict[str, list[int]],
    tmp_path: Path,
    spoilt: Callable[[Path], Path],
) -> None:
    folder = tmp_path / "step"
    if spoilt is not empty_folder:
        shutil.copytree(folders["old"], folder)
    body = {"path": str(spoilt(folder))}
    refused = Door(served_new).client.post("/update_weights_from_disk", json=body)
    assert refused.status_code in (400, 422), refused.text
    door, info = Door(served_new), {"update_info": {"path": "/"}}
    for path, more in (
        ("/finish_weight_update", {}),
        ("/prepare_weight_update", {}),
        ("/update_weights", info),
        ("/abort_weight_update", {}),
    ):
        status, told = door.refused(path, **more)
        assert (status, "no update is open; the last, " in told) == (409, True), told
    assert previous(served_new) == "old"
    goes_back(served_new, old_says)


@pytest.mark.parametrize(
    "opening",
    [
        {},
        {"manifest": {"format": 1, "config": {"num_hidden_layers": 77}}},
        {"manifest": {"format": 1, "step": 3}},
    ],
)
def test_an_aborted_update_without_data_keeps_the_rollback_target(
    served_new: EngineCore, old_says: dict[str, list[int]], opening: dict[str, Any]
) -> None:
    update = call(served_new, "start", transport="local", **opening)
    assert previous(served_new) == "old"
    if "config" not in opening.get("manifest", {}):  # that one ends by itself
        refused = served_new.inflight("rollback", {})
        assert refused["error"]["code"] == "update_in_progress"
    ranks = served_new.vllm_inflight.ranks
    until(lambda: is_told(ranks))
    call(served_new, "abort", update_id=update["update_id"])
    assert previous(served_new) == "old"
    goes_back(served_new, old_says)


def test_an_update_finished_without_data_keeps_the_rollback_target(
    served_new: EngineCore, old_says: dict[str, list[int]]
) -> None:
    call(served_new, "start", transport="local")
    answer = served_new.inflight("prepare", {}).result(timeout=30)
    assert answer["error"]["code"] == "weights_mismatch"
    goes_back(served_new, old_says)


def test_a_receive_from_a_missing_group_keeps_the_rollback_target(
    served_new: EngineCore, old_says: dict[str, list[int]]
) -> None:
    call(served_new, "start", transport="groups")
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    answer = served_new.inflight("receive", {"update_info": info | {"group_name": "g"}})
    assert answer.result(timeout=30)["error"]["code"] == "transfer_fault"
    goes_back(served_new, old_says)


def test_the_first_byte_of_an_update_drops_the_rollback_target(
    served_new: EngineCore, folders: dict[str, Path]
) -> None:
    stage(served_new, folders["old"])
    assert previous(served_new) is None
    call(served_new, "abort")
    assert previous(served_new) is None
    refused = served_new.inflight("rollback", {})
    assert refused["error"]["code"] == "nothing_to_roll_back"
    assert call(served_new, "info")["weight_version"] == "new"
    publish(served_new, folders["old"], "again")
    assert previous(served_new) == "new", "a commit has put another version there"


def test_a_foreign_transport_drops_the_rollback_target_when_it_receives(
    served_new: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write past the door, so nobody knows when its first byte comes."""
    # What is ours is taken for somebody else's.
    monkeypatch.setattr(
        "vllm.inflight.worker.staging.thread.StagedEngine", type("Other", (), {})
    )
    call(served_new, "start", transport="local")
    assert previous(served_new) == "old"
    info = {"update_info": {"path": str(folders["old"] / "nowhere")}}
    answer = served_new.inflight("receive", info).result(timeout=30)
    assert answer["error"]["code"] == "malformed"
    assert previous(served_new) is None


def test_a_rank_does_not_write_for_an_aborted_update(
    served_new: EngineCore,
    folders: dict[str, Path],
    old_says: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank is told between its first tensor and its first write."""
    opens, aborted = threading.Event(), threading.Event()
    opening = StagingWorker.open

    def open_late(self: StagingWorker, *args: Any) -> None:
        opens.set()
        assert aborted.wait(30)
        opening(self, *args)

    monkeypatch.setattr(StagingWorker, "open", open_late)
    call(served_new, "start", transport="local")
    served_new.inflight("receive", {"update_info": {"path": str(folders["old"])}})
    assert opens.wait(30)
    call(served_new, "abort")
    aborted.set()
    worker = served_new.model_executor.driver_worker.worker
    until(lambda: not worker.vllm_inflight.stager.is_busy)
    monkeypatch.undo()
    goes_back(served_new, old_says)


def test_a_flip_is_rejected_while_an_update_writes_the_shadow_weights(
    served_new: EngineCore, folders: dict[str, Path]
) -> None:
    with (
        standing(served_new, folders["old"]),
        pytest.raises(Exception, match="nothing is staged on this rank"),
    ):
        served_new.vllm_inflight.ranks.flip()
    call(served_new, "abort")
    assert previous(served_new) is None
