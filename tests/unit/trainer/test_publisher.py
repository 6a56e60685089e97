"""The publisher: what one publish sends, takes along and cleans up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.trainers.fake_engine import (
    ABORT,
    FINISH,
    HELD_S,
    START,
    UPDATE,
    publisher,
    weights,
)
from tests.support.waiting import until
from tests.unit.trainer.conftest import parcels
from vllm.inflight.errors import ConfigError, EngineUnreachable, Malformed
from vllm.inflight.trainer import Publisher
from vllm.inflight.trainer.http_client import HttpEngine
from vllm.inflight.trainer.snapshot import SHARED_MEMORY


def test_a_publish_brings_every_tensor_its_version_and_its_step(engine):
    with publisher(engine) as to:
        outcome = to.publish(version="step-7", step=7, mode="retract")
    assert engine.version["weight_version"] == "step-7"
    assert engine.version["step"] == 7
    assert engine.served.keys() == weights().keys()
    assert torch.equal(engine.served["a.weight"], weights()["a.weight"])
    assert engine.bodies(FINISH)[0]["mode"] == "retract"
    assert (outcome.version, outcome.epoch, outcome.step) == ("step-7", 1, 7)
    assert (outcome.num_bytes, outcome.gap_ms) == (64 + 12, 0.5)
    assert outcome.update_id == engine.bodies(START)[0]["update_id"]
    assert outcome.seconds.keys() == {"snapshot", "transfer", "commit", "total"}
    assert not outcome.skipped


def test_the_weights_are_those_of_the_call_whatever_the_optimiser_does_next(engine):
    source = weights(1.0)
    engine.delays[START] = 0.2
    with publisher(engine, source) as to:
        future = to.publish(block=False)
        source["a.weight"].fill_(2.0)
        assert future.result().version == "update-1"
    assert torch.all(engine.served["a.weight"] == 1.0)


def test_the_source_is_read_anew_at_every_publish(engine):
    source = weights(1.0)
    with publisher(engine, source) as to:
        to.publish()
        source["a.weight"].fill_(2.0)
        to.publish()
    assert torch.all(engine.served["a.weight"] == 2.0)


@pytest.mark.parametrize(
    "name_map", [{"a.weight": "model.a.weight"}, lambda n: n.replace("a.", "model.a.")]
)
def test_names_are_those_of_the_model_in_manifest_and_parcel(engine, name_map):
    with publisher(engine, name_map=name_map) as to:
        to.publish()
    assert sorted(engine.served) == ["b.weight", "model.a.weight"]
    told = engine.bodies(START)[0]["manifest"]["tensors"]
    assert sorted(entry["name"] for entry in told) == sorted(engine.served)


def test_a_subset_is_declared_and_nothing_else_is_sent(engine):
    with publisher(engine, name_map={"a.weight": "model.a.weight"}) as to:
        to.publish("whole")
        to.publish(subset=["model.*"], base_version="whole")
    assert engine.served.keys() == {"model.a.weight"}
    _, opening = engine.bodies(START)
    assert opening["manifest"]["subset"] == ["model.*"]
    assert [t["name"] for t in opening["manifest"]["tensors"]] == ["model.a.weight"]
    assert opening["base_version"] == "whole"


def test_a_subset_cannot_be_published_in_a_mode_that_may_skip_it(engine):
    for on_busy in ("skip", "latest"):
        with publisher(engine, on_busy=on_busy) as to, pytest.raises(ConfigError):
            to.publish(subset=["a.*"])
    with publisher(engine) as to, pytest.raises(Malformed, match="subset"):
        to.publish(subset=[])
    assert engine.calls == []


def test_two_names_that_become_one_are_rejected(engine):
    with publisher(engine, name_map=lambda _: "x") as to, pytest.raises(Malformed):
        to.publish()
    assert engine.calls == []


def test_a_snapshot_that_fails_gathers_to_the_end_with_the_other_ranks(engine):
    num_gathered = 0

    def source():
        nonlocal num_gathered
        for name in "abc":
            num_gathered += 1
            yield name, torch.ones(2, dtype=torch.complex64)

    with publisher(engine, source) as to, pytest.raises(Malformed, match="'a'"):
        to.publish()
    assert num_gathered == 3


@pytest.mark.parametrize("digests", [True, False])
def test_the_manifest_has_digests_unless_they_are_switched_off(engine, digests):
    with publisher(engine, digests=digests) as to:
        to.publish()
    told = engine.bodies(START)[0]["manifest"]["tensors"]
    assert [("digest" in entry) for entry in told] == [digests] * 2


def test_the_disk_wire_uses_its_directory_and_cleans_it(engine, tmp_path):
    with publisher(engine, wire="disk", directory=tmp_path) as to:
        to.publish()
    path = Path(engine.bodies(UPDATE)[0]["update_info"]["path"])
    assert path.parent == tmp_path
    assert parcels(tmp_path) == set()


def test_the_snapshot_is_removed_before_the_commit(engine):
    with publisher(engine) as to:
        engine.delays[FINISH] = 0.3
        future = to.publish(block=False)
        until(lambda: engine.bodies(FINISH))
        info = engine.bodies(UPDATE)[0]["update_info"]
        assert not (SHARED_MEMORY / info["shm"]).exists()
        future.result()


def test_progress_rises_from_zero_to_all_bytes(engine):
    told: list[tuple[str, int, int]] = []
    engine.held["tensor"] = threading.Event()  # until the first bytes have been told of

    def tell(phase: str, done: int, total: int) -> None:
        told.append((phase, done, total))
        if phase == "transfer":
            engine.held["tensor"].set()

    with publisher(engine, progress=tell) as to:
        to.publish()
    assert {total for _, _, total in told} == {76}
    assert [phase for phase, _, _ in told if phase != "transfer"] == [
        *("snapshot", "commit")
    ]
    transfer = [done for phase, done, _ in told if phase == "transfer"]
    assert transfer == sorted(transfer)
    assert len(set(transfer)) > 1
    assert transfer[-1] == 76


def test_progress_does_not_reach_the_end_while_the_status_is_unknown(
    engine, monkeypatch
):
    asked, told = [], []
    engine.held["tensor"] = threading.Event()

    def silent(*_):
        asked.append(True)
        if len(asked) > 2:
            engine.held["tensor"].set()
        raise EngineUnreachable("not now")

    monkeypatch.setattr(HttpEngine, "status", silent)
    with publisher(engine, progress=lambda *it: told.append(it)) as to:
        to.publish()
    assert [done for phase, done, _ in told if phase == "transfer"] == [76]


def test_an_error_in_the_progress_callback_gives_the_update_up(engine):
    def fail(phase: str, *_: int) -> None:
        if phase == "transfer":
            raise RuntimeError("no such widget")

    with (
        publisher(engine, progress=fail) as to,
        pytest.raises(RuntimeError, match="no such widget"),
    ):
        to.publish()
    assert (engine.bodies(FINISH), len(engine.bodies(ABORT))) == ([], 1)


def test_an_error_from_the_progress_callback_keeps_no_snapshot(engine):
    def fail(phase: str, *_: int) -> None:
        raise KeyError(phase)

    with (
        publisher(engine, progress=fail) as to,
        pytest.raises(KeyError, match="snapshot") as kept,
    ):
        to.publish()
    assert kept.tb is not None and parcels() == set()
    assert engine.calls == []


def test_an_error_in_the_progress_callback_after_the_commit_is_logged(engine, logged):
    def fail(phase: str, *_: int) -> None:
        if phase == "commit":
            raise RuntimeError("no such widget")

    with publisher(engine, progress=fail) as to:
        outcome = to.publish("v")
    assert (outcome.version, outcome.epoch) == ("v", 1)
    assert engine.version["weight_version"] == "v"
    assert len([line for line in logged if "no such widget" in line]) == 1


# ---------------------------------------------------------------------- the door
def test_the_key_is_the_argument_or_else_that_of_the_environment(engine, monkeypatch):
    for key, admin, api, sent in (
        ("given", "admin", "api", "given"),
        (None, "admin", "api", "admin"),
        (None, "", "api", "api"),
    ):
        monkeypatch.setenv("VLLM_INFLIGHT_ADMIN_KEY", admin)
        monkeypatch.setenv("VLLM_API_KEY", api)
        with publisher(engine, api_key=key) as to:
            to.publish()
        assert engine.key == f"Bearer {sent}"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wire": "nccl"}, "wire must be one of"),
        ({"on_busy": "panic"}, "on_busy must be one of"),
        ({"delta": "always", "digests": False}, "needs digests=True"),
        ({"wire": "disk"}, "directory="),
        ({"directory": "/tmp"}, "directory="),
        ({"source": iter([])}, "only once"),
        ({"engines": []}, "no engine"),
        ({"engines": "localhost:8000"}, "begins with http://"),
        ({"engines": ["http://a", "http://a/"]}, "named twice"),
        ({"engines": object()}, "not an engine with vllm-inflight"),
        ({"engines": "http://[::1"}, "URL"),
        ({"engines": "http://a..b"}, "URL"),
        ({"engines": f"http://{'a' * 64}.b"}, "URL"),
        ({"engines": "http://xn--zz"}, "URL"),
        ({"engines": "https://:80"}, "names no host"),
        ({"api_key": "s3crét"}, "no header"),
        ({"api_key": "s3cret\n"}, "no header"),
        ({"api_key": " s3cret"}, "blanks around"),
        ({"api_key": "s3cret "}, "blanks around"),
    ],
)
def test_a_wrong_argument_is_named_at_once(options, named):
    given = {"engines": "http://127.0.0.1:1", "source": weights()} | options
    with pytest.raises(ConfigError, match=named) as refused:
        Publisher(**given)
    assert "s3cr" not in str(refused.value)


def test_a_wrong_mode_or_label_is_rejected_before_anything_is_sent(engine):
    with publisher(engine) as to:
        with pytest.raises(Malformed, match="mode"):
            to.publish(mode="now")
        with pytest.raises(Malformed, match="weight_version"):
            to.publish(version="")
    assert engine.calls == []


def served(engine) -> torch.dtype:
    return engine.served["a.weight"].dtype


def test_an_engine_that_starts_again_gets_its_weights_in_the_dtype_that_it_has_then(
    engine,
):
    """All of these versions are whole: the stand-in serves none of known digest."""
    engine.dtype = "bfloat16"
    with publisher(engine) as to:
        to.publish()
        assert served(engine) is torch.float32
        for _ in range(2):
            to.publish()
            assert served(engine) is torch.bfloat16
        engine.dtype = "float32"  # this and the next publish tell of it
        to.publish()
        to.publish()
        assert served(engine) is torch.float32


def test_nobody_waits_for_an_engine_that_does_not_tell_its_dtype(engine):
    engine.dtype = "bfloat16"
    engine.held["/weight_info"] = threading.Event()
    with publisher(engine) as to:
        for _ in range(2):
            began = time.monotonic()
            to.publish()
            assert time.monotonic() - began < HELD_S
        assert served(engine) is torch.float32
        engine.held.pop("/weight_info").set()
        to.publish()
        to.publish()
    assert served(engine) is torch.bfloat16


@pytest.mark.seconds
def test_the_trainers_side_imports_nothing_of_the_engine():
    code = """if True:
        import sys
        import vllm.inflight.trainer
        heavy = ("v1", "config", "engine", "entrypoints", "model_executor",
                 "distributed", "platforms", "inflight.worker", "inflight.engine",
                 "inflight.api", "inflight.patch", "inflight.upstream")
        print([m for m in heavy if f"vllm.{m}" in sys.modules])
    """
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
