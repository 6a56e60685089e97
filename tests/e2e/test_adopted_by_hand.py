"""Adopted calls of frameworks, by classes that were written by hand.

They are in support/frameworks/by_hand.py. Failures are easier to make with them than
with the frameworks' own files, and some of those do not start on this vLLM.
"""

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import labels_across, served, tensors_of
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import (
    Streams,
    add,
    answers,
    call,
    ended_soon,
    prompt,
    publish,
)
from tests.support.engines.packing import packs
from tests.support.frameworks.by_hand import SENT, AReaL, Tensors
from tests.support.frameworks.core import beside_steps, extended_core
from vllm.inflight.errors import (
    EngineFault,
    InflightError,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.worker.staging import thread as staging_thread
from vllm.inflight.worker.staging.adopted import host_tensors
from vllm.inflight.worker.staging.adopted.host_tensors import HostTensors

pytestmark = pytest.mark.engine

ROOM = "tests.support.frameworks.by_hand"


def halves(tensors: Tensors) -> list[Tensors]:
    pairs = list(tensors.items())
    return [dict(pairs[:11]), dict(pairs[11:])]


def facts(tensors: Tensors) -> tuple[list[str], list[str], list[list[int]]]:
    names = list(tensors)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
    return names, dtypes, [list(t.shape) for t in tensors.values()]


def prime_rl(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    return core.collective_rpc("update_weights_from_path", args=(str(folder),))


def skyrl(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    core.collective_rpc("skyrl_start_weight_update")
    methods = "update_weights_ipc", "update_weights_nccl"
    for method, some in zip(methods, halves(tensors), strict=True):
        SENT.extend(some.items())
        core.collective_rpc(method, args=({"names": list(some)},))
    return core.collective_rpc("skyrl_finish_weight_update")


def bucket(core: EngineCore, tensors: Tensors) -> Any:
    """One of AReaL's buckets."""
    SENT.extend(tensors.items())
    core.collective_rpc("areal_set_weight_meta", args=(*facts(tensors), "update"))
    return core.collective_rpc("areal_update_weight_xccl")


def areal(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    return [bucket(core, some) for some in halves(tensors)][-1]


def areal_files(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    return core.collective_rpc("areal_update_weights", args=(str(folder),))


def nemo_rl_zmq(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    SENT.extend(tensors.items())
    return core.collective_rpc("update_weights_via_ipc_zmq")


def nemo_rl(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    SENT.extend(tensors.items())
    return core.collective_rpc("update_weights_from_collective")


def roll(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    first, second = halves(tensors)
    SENT.extend(tensors.items())
    core.collective_rpc("broadcast_parameter", args=(*facts(first), "update"))
    core.collective_rpc("update_parameter_in_bucket", args=([len(second)],))
    return core.collective_rpc("process_weights_after_loading")


def pipelinerl(core: EngineCore, folder: Path, tensors: Tensors) -> Any:
    SENT.extend(tensors.items())
    infos = [{"name": name} for name in tensors]
    asked = json.dumps({"version": 7, "parameters_info": infos})
    return core.collective_rpc("receive_weight_update", args=(asked,))


Send = Callable[[EngineCore, Path, Tensors], Any]

CASES: dict[str, tuple[Send, Any, str | None]] = {
    "PrimeRL": (prime_rl, None, "of folder"),
    "PrimeRLFiles": (prime_rl, None, "of folder"),
    "SkyRL": (skyrl, None, None),
    "AReaL": (areal, (True, "Success"), None),
    "AReaL: files": (areal_files, (True, "Success"), "of folder"),
    "NemoRL: zmq": (nemo_rl_zmq, True, None),
    "NemoRL": (nemo_rl, True, None),
    "Roll": (roll, None, None),
    "PipelineRL": (pipelinerl, None, "7"),
}
"""How a framework sends a version, the result of its last call, and its label."""


@pytest.fixture(scope="module", params=CASES)
def named(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path], named: str) -> Iterator[EngineCore]:
    with extended_core(folders["old"], f"{ROOM}.{named.partition(':')[0]}") as core:
        yield core
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_sent(booted: EngineCore) -> Iterator[None]:
    SENT.clear()
    yield
    worker = booted.model_executor.driver_worker.worker
    vars(worker).pop("_skyrl_weight_update_active", None)


def test_the_calls_become_one_version_beside_decoding(
    core: EngineCore,
    named: str,
    folders: dict[str, Path],
    record_property: Callable[[str, object], None],
) -> None:
    send, result, expected_label = CASES[named]
    new = folders["new"]
    digest = publish(core, new, "new")["digest"]
    expected = answers(core, "expected"), parameters(core)
    publish(core, folders["old"], "old")
    add(core, "runs", prompt(3), max_tokens=900)
    streams = Streams(core).step(8)
    replies = beside_steps(streams, lambda: send(core, new, tensors_of(new)))
    assert replies == [result]
    num = ended_soon(streams, "runs")
    label, epoch, committed = served(core)
    assert committed == digest
    record_property("digest", "equal")
    named_so = {None: f"update-{epoch}", "of folder": new.name}
    assert label == named_so.get(expected_label, expected_label)
    labels_across(streams, "old", label, num)
    assert answers(core, "after") == expected[0] and parameters(core) == expected[1]
    assert call(core, "rollback")["weight_version"] == "old"


@pytest.mark.parametrize("named", ["PrimeRL", "Roll"], indirect=True)
def test_tensors_that_several_threads_copy_become_a_version(
    core: EngineCore,
    named: str,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine on a GPU copies tensors of the host so; the host stands for it here."""
    copied: list[torch.Tensor] = []

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(HostTensors(torch.device("cpu")).copied(tensor))
        return copied[-1]

    monkeypatch.setattr(staging_thread, "as_it_is", to_device)
    monkeypatch.setattr(host_tensors, "LEAST_BYTES", 64)
    digest = publish(core, folders["new"], "new")["digest"]
    expected = answers(core, "expected"), parameters(core)
    publish(core, folders["old"], "old")
    with ThreadPoolExecutor(host_tensors.NUM_THREADS) as pool:
        monkeypatch.setattr(host_tensors, "_threads", lambda: pool)
        CASES[named][0](core, folders["new"], tensors_of(folders["new"]))
        assert len(copied) == len(tensors_of(folders["new"]))
        assert len(pool._threads) > 1
    assert served(core)[2] == digest
    assert (answers(core, "after"), parameters(core)) == expected


def test_a_version_that_lacks_a_tensor_changes_nothing(
    core: EngineCore, named: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    send = CASES[named][0]
    before, said = served(core), answers(core, "before")
    tensors = tensors_of(folders["new"])
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    if named == "AReaL":  # nothing marks the end, so the version stays open
        send(core, tmp_path, tensors)
        core.reset_prefix_cache()
        last = call(core, "status")["outcomes"][0]
        assert last["error"]["message"].startswith("reset_prefix_cache was called")
    else:
        with pytest.raises(WeightsMismatch) as raised:
            send(core, tmp_path, tensors)
        assert raised.value.tensors == ["model.norm.weight"]
    assert served(core) == before and answers(core, "after") == said


def test_a_failure_changes_nothing_and_is_told_as_the_framework_tells_it(
    core: EngineCore, named: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    send = CASES[named][0]
    before, said = served(core), answers(core, "before")
    tensors = tensors_of(folders["new"])
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InflightError, match=r"model\.norm\.weight"):
        send(core, tmp_path, tensors)
    assert served(core) == before and answers(core, "after") == said
    assert call(core, "status")["active"] is None
    # A framework's method may have named its files there.
    assert core.vllm_config.model_config.model != str(tmp_path)


@pytest.mark.parametrize("named", ["AReaL", "NemoRL"], indirect=True)
def test_a_failure_that_is_a_result_is_returned_and_changes_nothing(
    core: EngineCore, named: str, folders: dict[str, Path]
) -> None:
    send = CASES[named][0]
    before, said = served(core), answers(core, "before")
    tensors: Any = tensors_of(folders["new"])
    tensors["model.norm.weight"] = None  # nothing that a loader could take
    if named == "AReaL":
        SENT.extend(tensors.items())
        meta = list(tensors), [], [], "update"
        core.collective_rpc("areal_set_weight_meta", args=meta)
        ((is_done, text),) = core.collective_rpc("areal_update_weight_xccl")
        assert (is_done, text.startswith("Failed to update")) == (False, True)
    else:
        assert send(core, folders["new"], tensors) == [False]
    last = call(core, "status")["outcomes"][0]
    assert (last["phase"], last["error"]["code"]) == ("aborted", "engine_fault")
    assert served(core) == before and answers(core, "after") == said


class Broken:
    """AReaL's call, whose group breaks before a tensor has come."""

    def receive(self: Any) -> None:
        raise RuntimeError("nothing came")


@pytest.mark.parametrize("named", ["AReaL"], indirect=True)
@pytest.mark.parametrize("is_begun", [True, False])
def test_the_rest_of_a_failed_version_is_rejected_and_not_completed_by_the_next(
    core: EngineCore,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    is_begun: bool,
) -> None:
    """A version begins with the tensor that others have begun with."""
    areal(core, folders["new"], tensors_of(folders["new"]))
    digest = publish(core, folders["new"], "new")["digest"]
    publish(core, folders["old"], "old")
    before = served(core)
    (first, rest), (own, last) = map(halves, map(tensors_of, folders.values()))
    if is_begun:
        bucket(core, first)
        core.reset_prefix_cache()  # which another client has called
        told = "cache was called before AReaL had"
    else:
        monkeypatch.setattr(AReaL, "areal_update_weight_xccl", Broken.receive)
        with pytest.raises(EngineFault, match="nothing came"):
            bucket(core, {})
        monkeypatch.undo()
        told = "nothing came"
    for some in halves(rest):
        with pytest.raises(InflightError, match=told):
            bucket(core, some)
    bucket(core, own)
    assert served(core) == before
    bucket(core, last)
    assert served(core)[2] == digest


@pytest.mark.parametrize("named", ["AReaL"], indirect=True)
def test_a_trainer_may_send_in_another_order_after_a_version_has_failed(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    digest = publish(core, folders["new"], "new")["digest"]
    publish(core, folders["old"], "old")
    first, last = halves(tensors_of(folders["new"]))
    bucket(core, first)
    core.reset_prefix_cache()
    with pytest.raises(WrongPhase):
        bucket(core, last)
    bucket(core, last)
    bucket(core, first)
    assert served(core)[2] == digest


@pytest.mark.parametrize("named", ["NemoRL"], indirect=True)
def test_parameters_that_an_extension_remembers_are_those_of_the_shadow_weights(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    nemo_rl(core, folders["new"], tensors_of(folders["new"]))
    worker = core.model_executor.driver_worker.worker
    assert "_nrl_named_parameters" not in vars(worker)
    (mine,) = core.collective_rpc("_get_named_parameters")
    (live,) = core.collective_rpc(
        lambda w: [id(p) for p in w.model_runner.model.parameters()]
    )
    assert [id(param) for param in mine.values()] == live
    vars(worker).pop("_nrl_named_parameters")


@pytest.mark.parametrize("named", ["PrimeRL"], indirect=True)
def test_versions_from_folders_of_one_name_share_a_label_and_differ_in_epoch_and_digest(
    core: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    """prime-rl's label is the folder's name, and two runs may have a `step_1`."""
    places = []
    for number, label in enumerate(("new", "old")):
        place = tmp_path / f"run-{number}" / "step_1"
        shutil.copytree(folders[label], place)
        places.append(place)
    add(core, "runs", prompt(3), max_tokens=60)
    streams, found, said = Streams(core).step(10), [], []
    for place in places:
        prime_rl(core, place, {})
        found.append(served(core))
        add(core, f"of {place.parent.name}", prompt(8))
        streams.step(45)
        said.append(streams.tokens[f"of {place.parent.name}"])
    streams.run()
    (label, epoch, digest), (again, later, other) = found
    assert (label, again, later) == ("step_1", "step_1", epoch + 1)
    assert digest is not None and digest != other
    assert said[0] != said[1], "the second was served KV of the first"
    # The label alone does not tell what a client expects: the digest does.
    expected = {"expect_version": "step_1", "expect_digest": digest}
    call(core, "start", transport="local")
    call(core, "receive", update_info={"path": str(folders["old"])})
    call(core, "prepare")
    refused = core.inflight("commit", {"weight_version": "step_1"} | expected)
    assert refused["error"]["code"] == "weights_mismatch"
    call(core, "abort")


@pytest.mark.parametrize("named", ["SkyRL"], indirect=True)
def test_parts_after_a_failed_begin_are_rejected_with_its_error(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    before = served(core)
    core.collective_rpc("skyrl_start_weight_update")
    with pytest.raises(InflightError, match="active already"):
        core.collective_rpc("skyrl_start_weight_update")
    for method, args in (
        ("update_weights_ipc", ({"names": []},)),
        ("skyrl_finish_weight_update", ()),
    ):
        with pytest.raises(InflightError, match="active already"):
            core.collective_rpc(method, args=args)
    assert served(core) == before


@pytest.mark.parametrize("named", ["Roll"], indirect=True)
def test_an_adapter_of_roll_is_no_version(core: EngineCore) -> None:
    before = call(core, "status")["outcomes"]
    args = [], [], [], "update", True
    assert core.collective_rpc("broadcast_parameter", args=args) == [None]
    assert call(core, "status")["outcomes"] == before


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("model.norm.weight", (128,), r"missing: .*q_proj\.weight"),
        (
            *("model.layers.0.self_attn.qkv_proj.weight", (256, 128)),
            # Where it is packed, it has no memory of its own.
            "must match the size" if packs(torch.bfloat16) else "missing: .*q_norm",
        ),
    ],
)
@pytest.mark.parametrize("named", ["PrimeRL"], indirect=True)
def test_writes_into_some_of_the_parameters_are_rejected_by_name(
    core: EngineCore, name: str, sizes: tuple[int, ...], why: str
) -> None:
    """prime-rl sends kernel format if it quantises in the transfer."""
    before, said = served(core), answers(core, "before")
    core.collective_rpc("init_broadcaster", args=(True,))
    SENT.append((name, torch.ones(sizes, dtype=torch.bfloat16)))
    with pytest.raises(InflightError, match=why):
        core.collective_rpc("update_weights_from_path", args=("nowhere",))
    core.collective_rpc("init_broadcaster", args=(False,))
    assert served(core) == before and answers(core, "after") == said
