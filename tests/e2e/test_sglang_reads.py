"""What SGLang's and upstream's clients read of what a real core serves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.engines.bare_core import publish
from tests.support.engines.core_door import Door
from tests.support.engines.sent_tensors import tensors
from vllm.inflight.api.compat import sglang
from vllm.inflight.worker.verify import readback

pytestmark = pytest.mark.engine

HEAD, NORM = "lm_head.weight", "model.norm.weight"


def test_weights_are_read_by_the_checkpoints_names(
    door: Door, folders: dict[str, Path]
) -> None:
    served = tensors(folders["old"])
    for name in (
        HEAD,
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ):
        rows = door.post("/get_weights_by_name", name=name, truncate_size=3)
        assert rows == served[name][:3].float().tolist(), name
    rows = door.get("/get_weights_by_name", name="model.norm.weight")
    assert len(rows) == min(100, len(served["model.norm.weight"]))


def test_a_value_that_is_not_finite_is_read_as_null(
    door: Door, folders: dict[str, Path], tmp_path: Path
) -> None:
    served = tensors(folders["old"])
    norm = served["model.norm.weight"].clone()
    norm[1], norm[2] = float("inf"), float("nan")
    save_file(served | {"model.norm.weight": norm}, tmp_path / "model.safetensors")
    diverged = {"path": str(tmp_path), "allow_nonfinite": True}
    reply = door.client.post("/update_weights_from_disk", json=diverged)
    assert reply.status_code == 200, reply.text
    rows = door.get("/get_weights_by_name", name="model.norm.weight", truncate_size=4)
    assert rows == [norm[0].item(), None, None, norm[3].item()]


def test_a_trainer_can_read_the_tensor_names_that_an_update_may_send(
    door: Door, folders: dict[str, Path]
) -> None:
    told = door.get("/weight_names")
    served = tensors(folders["old"])
    assert (told["of"], told["num_tensors"]) == ("checkpoint", len(served))
    assert {each["name"]: each for each in told["tensors"]} == {
        name: {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for name, tensor in served.items()
    }
    assert door.client.get("/weight_names", params={"of": "model"}).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        {"name": "no.such"},
        {},
        {"name": HEAD, "truncate_size": 0},
        {"name": HEAD, "truncate_size": "9" * 30},
    ],
)
def test_an_invalid_read_of_weights_is_rejected(door: Door, body: Any) -> None:
    assert door.refused("/get_weights_by_name", **body)[0] == 400


def test_a_read_of_too_many_numbers_is_rejected(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readback, "MOST_NUMBERS", 1000)
    status, told = door.refused("/get_weights_by_name", name=HEAD, truncate_size=99)
    assert status == 400
    assert "at most 1000" in told
    assert len(door.post("/get_weights_by_name", name=HEAD, truncate_size=2)) == 2


def test_checksums_distinguish_two_versions_and_return_with_a_rollback(
    door: Door, folders: dict[str, Path]
) -> None:
    (before,) = door.post("/weights_checker")["ranks"]
    baseline = door.post("/weight_checker", action="checksum")["checksums"]
    assert set(baseline) == {f"dp0:pp0:pcp0:tp0:{n}" for n in before["checksums"]}
    publish(door.core, folders["new"], "new")
    (after,) = door.post("/weights_checker", action="checksum")["ranks"]
    same = [
        n
        for n in before["checksums"]
        if after["checksums"][n] == before["checksums"][n]
    ]
    # Norms are ones in every random model; every drawn weight differs.
    assert all("norm" in name for name in same) and len(after["checksums"]) > len(same)
    assert after["per_gpu_checksum"] != before["per_gpu_checksum"]
    compared = door.post("/weight_checker", action="compare", baseline=baseline)
    assert compared["match"] is False and compared["mismatches"]
    door.post("/rollback_weights")
    compared = door.post("/weight_checker", action="compare", baseline=baseline)
    assert compared == {"match": True, "mismatches": []}


def served_norm(door: Door) -> torch.Tensor:
    """The memory of a parameter; a call of its worker would be noticed."""
    worker: Any = door.core.model_executor.driver_worker
    param: torch.Tensor = worker.worker.model_runner.model.get_parameter(NORM)
    return param.data


def test_the_live_weights_are_compared_with_their_digest(
    door: Door, folders: dict[str, Path]
) -> None:
    digest = publish(door.core, folders["new"], "new")["digest"]
    told = door.post("/weights_checker", action="verify")
    assert (told["success"], told["result"]) == (True, "equal")
    assert (told["weight_version"], told["digest"]) == ("new", digest)
    assert "the live weights are what was committed" in told["message"]
    # The engine computes in a wider dtype than its checkpoint has, which loses nothing.
    assert told["num_tensors"] > 0 and told["num_unknown"] == 0
    norm = served_norm(door)
    norm[5] *= -1
    told = door.post("/weights_checker", action="verify")
    assert (told["success"], told["result"]) == (False, "different")
    assert told["different"] == [NORM] and NORM in told["message"]
    assert (told["weight_version"], told["digest"]) == ("new", digest)
    norm[5] *= -1
    assert door.post("/weights_checker", action="verify")["result"] == "equal"


def test_checksums_leave_out_what_is_to_be_skipped(door: Door) -> None:
    told = door.post("/weights_checker", skip_tensor_list=["norm"])
    (rank,) = told["ranks"]
    assert rank["checksums"] and not any("norm" in n for n in rank["checksums"])
    assert told["per_engine_checksum"]


@pytest.mark.parametrize(
    ("path", "action"),
    [
        ("/weights_checker", "reset_tensors"),
        ("/weights_checker", "snapshot"),
        ("/weight_checker", "reset"),
    ],
)
def test_an_action_that_would_touch_live_weights_is_rejected(
    door: Door, path: str, action: str
) -> None:
    status, message = door.refused(path, action=action)
    assert (status, action in message) == (400, True)


@pytest.mark.parametrize(
    "path", ["/release_memory_occupation", "/resume_memory_occupation"]
)
def test_memory_is_not_released_without_sleep_mode(door: Door, path: str) -> None:
    status, message = door.refused(path, tags=["weights"])
    assert (status, "--enable-sleep-mode" in message) == (409, True)
    assert door.refused(path, tags=["cuda_graph"])[0] == 400


def test_a_checkpoint_engine_is_rejected_without_the_flag_and_without_a_gpu(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = "/update_weights_from_ipc", {"zmq_handles": {"GPU-0": "ipc://a"}}
    with monkeypatch.context() as patched:
        patched.setattr(sglang, "reject", None)  # no socket is opened
        status, message = door.refused(path, **body)
    assert (status, "--inflight-pickled-tensors on" in message) == (400, True)
    config = {"inflight": {"pickled_tensors": "on"}}
    monkeypatch.setattr(door.core.vllm_config, "additional_config", config)
    status, message = door.refused(path, **body)
    assert (status, "this engine runs on cpu" in message) == (400, True), message
    status, message = door.refused(path, zmq_handles={})
    assert (status, "'zmq_handles' must be" in message) == (400, True), message
    assert door.refused(path)[0] == 400
    assert door.get("/weight_update")["active"] is None


def test_server_info_shows_upstreams_configuration_without_the_token(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = door.core.vllm_config.model_config
    monkeypatch.setattr(model, "hf_token", "hf_secret")
    config = door.get("/server_info", config_format="json")["vllm_config"]
    assert config["weight_transfer_config"] is None
    assert config["model_config"]["hf_token"] == "set"
    assert "model=" in door.get("/server_info")["vllm_config"]
