"""Sleep with delta staging: the log is given back, lost weights are filled in place.

The tests of test_sleep.py, and what is served after a sleep of level 2.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_delta_staging import without_packing  # noqa: F401 (a fixture)
from tests.e2e.test_delta_staging_target import booted  # noqa: F401 (a fixture)
from tests.e2e.test_sleep import (  # noqa: F401 (tests, run here with delta staging)
    extended,
    may_sleep,
    refused,
    says,
    test_a_sleep_is_rejected_while_a_transfer_does_not_end,
    test_an_update_goes_on_while_only_the_kv_cache_is_asleep,
    test_an_update_under_way_ends_with_the_reason,
    test_calls_that_need_weights_are_rejected_while_the_weights_sleep,
    test_nothing_is_decoded_after_a_level_2_sleep_until_a_whole_version_arrives,
    test_out_of_band_writes_that_fill_lost_weights_end_the_wait,
    test_sleep_changes_neither_weights_nor_tokens,
)
from tests.support.deltas import stepped
from tests.support.engines.bare_core import Streams, add, call, prompt, publish, stage
from tests.support.engines.sleeping_with_a_log import sleeping_with_a_log
from tests.support.waiting import until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def giving_back() -> Iterator[list[str]]:
    with sleeping_with_a_log() as asked:
        yield asked


@pytest.fixture
def sleeper(core: EngineCore) -> Iterator[EngineCore]:
    """A core on the old weights that may sleep."""
    with may_sleep(core):
        yield core


def stager_of(core: EngineCore) -> Any:
    return core.model_executor.driver_worker.worker.vllm_inflight.stager


def bytes_of_log(core: EngineCore) -> int:
    area = stager_of(core).shadow.log._memory
    return 0 if area is None else len(area.memory)


def lost(core: EngineCore) -> EngineCore:
    """The core after a sleep of level 2, awake and without weights."""
    core.sleep(2)
    core.wake_up()
    assert call(core, "info")["weights"] == "gone"
    return core


def detail(core: EngineCore) -> str:
    return str(call(core, "info")["weights_detail"])


@pytest.mark.parametrize("level", [1, 2])
def test_the_log_is_given_back_and_comes_again(sleeper: EngineCore, level: int) -> None:
    before = bytes_of_log(sleeper)
    assert before > 0
    sleeper.sleep(level)
    assert bytes_of_log(sleeper) == 0
    sleeper.wake_up(["kv_cache"])
    assert bytes_of_log(sleeper) == 0
    sleeper.wake_up(["weights"])
    assert bytes_of_log(sleeper) == before


def test_after_level_1_the_next_version_is_logged_and_can_be_taken_back(
    sleeper: EngineCore, folders: dict[str, Path]
) -> None:
    before = says(sleeper, "before")
    sleeper.sleep(1)
    sleeper.wake_up()
    publish(sleeper, folders["new"], "new")
    after = says(sleeper, "after")
    assert stager_of(sleeper).shadow.log.num_elements > 0
    call(sleeper, "rollback")
    assert says(sleeper, "back") == before != after


def test_lost_weights_are_filled_in_place_and_updates_go_on_from_there(
    sleeper: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    publish(sleeper, folders["new"], "new")
    expected, digest = says(sleeper, "expected"), call(sleeper, "info")["digest"]
    for _ in range(2):
        lost(sleeper)
        publish(sleeper, folders["new"], "again")
        assert stager_of(sleeper).shadow.log.num_elements == 0, "nothing is logged"
        told = call(sleeper, "info")
        assert (told["weights"], told["digest"]) == ("live", digest)
        assert says(sleeper, "again") == expected
    verified = sleeper.inflight("verify", {})
    verified = verified if isinstance(verified, dict) else verified.result(timeout=60)
    assert verified["ok"]["result"] == "equal"
    weights = load_file(folders["new"] / "model.safetensors")
    save_file(stepped(weights, 1, share=0.01), tmp_path / "model.safetensors")
    publish(sleeper, tmp_path, "stepped")
    assert stager_of(sleeper).shadow.log.num_elements > 0
    call(sleeper, "rollback")
    assert call(sleeper, "info")["digest"] == digest


def test_weights_in_another_dtype_fill_lost_weights_too(
    sleeper: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights = load_file(folders["new"] / "model.safetensors")
    full = {name: t.float() * 1.01 for name, t in weights.items()}
    save_file(full, tmp_path / "model.safetensors")
    publish(sleeper, tmp_path, "full")
    expected = says(sleeper, "expected")
    lost(sleeper)
    publish(sleeper, tmp_path, "again")
    assert says(sleeper, "again") == expected


def test_a_version_without_a_tensor_leaves_lost_weights_lost_and_all_of_them_missing(
    sleeper: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights = load_file(folders["new"] / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    lost(sleeper)
    before = detail(sleeper)
    assert ": 0 of " in before
    call(sleeper, "start", transport="local")
    # Headers may be judged before a byte is read; then nothing is written at all.
    for method, body in (
        ("receive", {"update_info": {"names": None, "path": str(tmp_path)}}),
        ("prepare", {}),
    ):
        answer = sleeper.inflight(method, body)
        answer = answer if isinstance(answer, dict) else answer.result(timeout=30)
    assert "error" in answer
    until(lambda: call(sleeper, "status")["active"] is None)
    sleeper.vllm_inflight.step_queue.run(lambda: None)
    assert call(sleeper, "info")["weights"] == "gone"
    assert detail(sleeper) == before
    assert refused(sleeper, "resume") == "engine_asleep"
    publish(sleeper, folders["new"], "new")
    assert call(sleeper, "info")["weights"] == "live"


def test_a_fill_in_parts_is_no_news_to_those_who_watch_for_writes(
    sleeper: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    weights = load_file(folders["new"] / "model.safetensors")
    names = sorted(weights)
    lost(sleeper)
    before = detail(sleeper)
    call(sleeper, "start", transport="local")
    for number, part in enumerate((names[:9], names[9:])):
        file = tmp_path / f"{number}.safetensors"
        save_file({name: weights[name] for name in part}, file)
        call(sleeper, "receive", update_info={"path": str(file)})
        # A start looks for writes before it is rejected.
        assert refused(sleeper, "start", transport="local") == "update_in_progress"
        assert detail(sleeper) == before
    call(sleeper, "prepare")
    call(sleeper, "commit", weight_version="new")
    assert call(sleeper, "info")["weights"] == "live"


@pytest.mark.parametrize("phase", ["filling", "staged"])
def test_an_aborted_fill_is_taken_back_and_counts_for_nothing(
    sleeper: EngineCore, folders: dict[str, Path], phase: str
) -> None:
    publish(sleeper, folders["new"], "new")
    expected = says(sleeper, "expected")
    lost(sleeper)
    before = detail(sleeper)
    if phase == "staged":
        stage(sleeper, folders["new"])
    else:
        call(sleeper, "start", transport="local")
        call(sleeper, "receive", update_info={"path": str(folders["new"])})
    params = list(stager_of(sleeper).shadow.live.parameters())
    assert detail(sleeper) == before, "what an update fills is no news"
    call(sleeper, "abort")
    sleeper.vllm_inflight.step_queue.run(lambda: None)
    assert call(sleeper, "info")["weights"] == "gone"
    assert detail(sleeper) == before
    words = torch.cat([param.data.view(-1).view(torch.int64) for param in params])
    assert len(words.unique()) == 1, "weights of no version are left"
    add(sleeper, "waits", prompt(3))
    assert Streams(sleeper).step(3).tokens == {}
    publish(sleeper, folders["new"], "again")
    assert Streams(sleeper).run().tokens["waits"] == expected


def fail_as_it_writes(worker: Any) -> None:
    worker.model_runner.get_model().model.norm.weight.data.fill_(7.0)
    raise RuntimeError("it broke off")


def test_a_sleep_in_the_middle_of_a_fill_leaves_nothing_of_it(
    sleeper: EngineCore, folders: dict[str, Path]
) -> None:
    with pytest.raises(RuntimeError, match="it broke off"):
        sleeper.collective_rpc(fail_as_it_writes)
    before = detail(sleeper)
    assert ": 0 of " in before
    call(sleeper, "start", transport="local")
    call(sleeper, "receive", update_info={"path": str(folders["new"])})
    sleeper.sleep(1)
    sleeper.vllm_inflight.step_queue.run(lambda: None)  # it is asleep by then
    sleeper.wake_up()
    assert call(sleeper, "info")["weights"] == "gone"
    assert detail(sleeper) == before
    sleeper.collective_rpc("reload_weights")
    assert call(sleeper, "info")["weights"] == "live"


def test_what_others_write_while_weights_are_filled_is_found_before_the_commit(
    sleeper: EngineCore, folders: dict[str, Path]
) -> None:
    lost(sleeper)
    call(sleeper, "start", transport="local")
    call(sleeper, "receive", update_info={"path": str(folders["new"])})
    params = list(stager_of(sleeper).shadow.live.parameters())
    params[0].data.view(-1)[77] += 1
    assert refused(sleeper, "prepare") == "engine_fault"
    sleeper.vllm_inflight.step_queue.run(lambda: None)
    assert call(sleeper, "info")["weights"] == "gone"
    publish(sleeper, folders["new"], "new")


def test_what_others_write_into_filled_weights_stops_the_commit(
    sleeper: EngineCore, folders: dict[str, Path]
) -> None:
    lost(sleeper)
    stage(sleeper, folders["new"])
    params = list(stager_of(sleeper).shadow.live.parameters())
    params[-1].data.mul_(3)
    update_id = call(sleeper, "status")["active"]["update_id"]
    assert refused(sleeper, "commit", update_id=update_id) == "update_in_progress"
    sleeper.vllm_inflight.step_queue.run(lambda: None)
    assert call(sleeper, "info")["weights"] == "gone"
    publish(sleeper, folders["new"], "new")
    assert call(sleeper, "info")["weights"] == "live"


def test_a_rollback_over_a_fill_is_refused(
    sleeper: EngineCore, folders: dict[str, Path]
) -> None:
    lost(sleeper)
    publish(sleeper, folders["new"], "new")
    assert refused(sleeper, "rollback") == "nothing_to_roll_back"
