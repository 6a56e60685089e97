"""vLLM's own trainer interface and a server with a key, with a client of ours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.support.models.checkpoint_source import CheckpointSource
from tests.support.serving import Server
from tests.support.transports.peers import HOST
from tests.unit.trainer.conftest import noted
from vllm.inflight import ops
from vllm.inflight.errors import (
    ConfigError,
    Forbidden,
    Unauthorized,
    VersionConflict,
    WeightsMismatch,
    WrongPhase,
)
from vllm.inflight.trainer import ServerClient
from vllm.inflight.trainer.http_client import HttpEngine
from vllm.inflight.transport.collective.trainer_engine import GlooTrainerInitInfo

pytestmark = pytest.mark.engine

KEY = "a-key-of-the-tests"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    flags = ("--weight-transfer-config", '{"backend": "inflight_gloo"}')
    with Server(old, *flags, key=KEY) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[ServerClient]:
    with ServerClient(server.url, api_key=KEY, timeout_s=60) as client:
        yield client


def joined(client: Any, source: CheckpointSource, **options: Any) -> Any:
    """Upstream's trainer, in a group with the server's workers."""
    info = GlooTrainerInitInfo(
        rank=0,
        master_address=HOST,
        master_port=0,
        world_size=2,
        bucket_bytes=1 << 16,
        timeout_s=30.0,
        **options,
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


@pytest.fixture
def source(new: Path) -> CheckpointSource:
    return CheckpointSource(new)


@pytest.fixture
def trainer(client: ServerClient, source: CheckpointSource) -> Iterator[Any]:
    trainer = joined(client, source)
    yield trainer
    trainer.shutdown()
    client.shutdown_weight_transfer_engine()


@pytest.fixture
def info(server: Server) -> Callable[[], Any]:
    """What the server says it serves."""
    return lambda: server.client.get("/weight_info").json()


def test_a_server_client_implements_upstreams_sync_client_interface(
    client: ServerClient,
) -> None:
    assert isinstance(client, VLLMWeightSyncClient)
    assert client.get_world_size() == 1


def test_a_version_arrives_under_its_label_and_step(
    client: ServerClient, trainer: Any, info: Callable[[], Any]
) -> None:
    client.announce("step-7", step=7)
    trainer.send_weights()
    served = info()
    assert (served["weight_version"], served["step"]) == ("step-7", 7)
    assert client.committed is not None
    assert client.committed["digest"] == served["digest"]
    assert client.weight_info() == served
    trainer.send_weights()
    assert info()["weight_version"] == f"update-{served['epoch'] + 1}"


def test_a_version_is_one_call_of_the_server(
    server: Server,
    client: ServerClient,
    trainer: Any,
    source: CheckpointSource,
    info: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = noted(monkeypatch, HttpEngine, "_ask")

    def made() -> list[tuple[str, list[str]]]:
        """Path and optional fields of the calls since the last look."""
        calls = [each.args for each in asked]
        asked.clear()
        return [
            (path, sorted({"start", "finish"} & body.keys()))
            for _, path, _, body, *_ in calls
        ]

    epoch = info()["epoch"]
    trainer.send_weights()
    assert made() == [("/update_weights", ["finish", "start"])]
    assert info()["epoch"] == epoch + 1
    # A rejected start: nothing is open afterwards, and the group is opened again.
    client.announce("elsewhere", base_version="served by nobody")
    with pytest.raises(VersionConflict, match="served by nobody"):
        trainer.send_weights()
    assert server.client.get("/weight_update").json()["active"] is None
    client.announce("again")
    made()
    trainer.send_weights()
    assert made()[-1] == ("/update_weights", ["finish", "start"])
    assert (info()["weight_version"], info()["epoch"]) == ("again", epoch + 2)


def test_an_update_is_one_request_and_may_be_repeated(
    server: Server, info: Callable[[], Any]
) -> None:
    epoch = info()["epoch"]
    refused = {"update_info": {}, "start": {"update_id": "refused"}, "finish": {}}
    reply = server.client.post("/update_weights", json=refused)
    assert reply.status_code >= 400
    assert server.client.get("/weight_update").json()["active"] is None
    again = server.client.post("/update_weights", json=refused)
    assert again.json()["error"]["code"] == reply.json()["error"]["code"]
    assert info()["epoch"] == epoch


def test_a_server_cannot_be_joined_without_its_key(
    server: Server, source: CheckpointSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ServerClient(server.url) as nobody,
        pytest.raises(Unauthorized, match="Bearer") as raised,
    ):
        joined(nobody, source)
    assert server.url in str(raised.value)
    with (
        ServerClient(server.url, api_key="wrong") as stranger,
        pytest.raises(Forbidden),
    ):
        joined(stranger, source)
    monkeypatch.setenv("VLLM_INFLIGHT_ADMIN_KEY", KEY)
    with ServerClient(server.url) as known:
        assert known.get_world_size() == 1


def test_a_rejection_names_its_tensors_and_the_version_is_sent_again(
    client: ServerClient,
    trainer: Any,
    source: CheckpointSource,
    info: Callable[[], Any],
) -> None:
    before = info()["epoch"]
    norm = source.tensors.pop(NORM)
    client.announce("step-8")
    with pytest.raises(WeightsMismatch) as raised:
        trainer.send_weights()
    assert raised.value.tensors == [NORM]
    assert info()["epoch"] == before
    source.tensors[NORM] = norm
    trainer.send_weights()
    assert info()["weight_version"] == "step-8"


def test_a_trainer_that_gave_up_half_way_sends_the_next_one(
    client: ServerClient,
    trainer: Any,
    source: CheckpointSource,
    info: Callable[[], Any],
) -> None:
    class Stopped(Exception):
        pass

    class Half(CheckpointSource):
        def __init__(self) -> None:
            self.tensors = source.tensors

        def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(self.tensors.items())[:6]
            raise Stopped

    client.announce("step-9")
    trainer.source = Half()
    with pytest.raises(Stopped):
        trainer.send_weights()
    trainer.source = source
    trainer.send_weights()
    assert info()["weight_version"] == "step-9"


def test_a_client_can_abort_its_update(
    server: Server, client: ServerClient, trainer: Any, info: Callable[[], Any]
) -> None:
    before = info()["epoch"]
    client.start_weight_update()
    client.abort_weight_update()
    assert server.client.get("/weight_update").json()["active"] is None
    with pytest.raises(WrongPhase):
        client.finish_weight_update()
    assert info()["epoch"] == before
    trainer.send_weights()
    assert info()["epoch"] == before + 1


def test_a_trainer_that_is_started_again_ends_what_was_left(
    server: Server, client: ServerClient
) -> None:
    client.start_weight_update()
    with ServerClient(server.url, api_key=KEY) as next_one:
        next_one.abort_weight_update()
    assert server.client.get("/weight_update").json()["active"] is None


@pytest.fixture(params=["device", "host"])
def delta_trainer(
    client: ServerClient, source: CheckpointSource, request: pytest.FixtureRequest
) -> Iterator[Any]:
    trainer = joined(client, source, delta="auto", delta_memory=request.param)
    yield trainer
    trainer.shutdown()
    client.shutdown_weight_transfer_engine()


def test_a_trainer_sends_deltas_to_a_server(
    client: ServerClient,
    delta_trainer: Any,
    source: CheckpointSource,
    info: Callable[[], Any],
) -> None:
    source.tensors = {n: t.clone() for n, t in source.tensors.items()}

    def sent(version: str, **facts: Any) -> bool:
        client.announce(version, **facts)
        delta_trainer.send_weights()
        assert info()["weight_version"] == version
        assert client.committed is not None
        digests = ops.digest(list(source.tensors.values()))
        facts_of = zip(source.tensors.items(), digests, strict=True)
        assert info()["digest"] == ops.manifest_digest(
            (name, str(t.dtype).removeprefix("torch."), tuple(t.shape), digest)
            for (name, t), digest in facts_of
        )
        return delta_trainer.deltas.last.is_delta

    def step() -> None:
        source.tensors[NORM].view(torch.int16)[:3] += 1

    assert not sent("whole")
    step()
    assert sent("changed", step=12)
    assert info()["step"] == 12
    assert sent("the same")

    # What the server rejects, and what the trainer gives up, leaves the base as it was.
    step()
    client.announce("rejected", base_version="another")
    with pytest.raises(VersionConflict):
        delta_trainer.send_weights()
    with pytest.MonkeyPatch.context() as patch:

        def stops(*_: Any) -> None:
            raise RuntimeError("the trainer stops")

        patch.setattr(delta_trainer, "_send", stops)
        client.announce("given up")
        with pytest.raises(RuntimeError, match="the trainer stops"):
            delta_trainer.send_weights()
    assert info()["weight_version"] == "the same"
    step()
    assert sent("after that")

    # Most of a tensor list is another one, so a delta would not be less to send.
    for tensor in source.tensors.values():
        tensor.view(torch.int16).bitwise_xor_(0x55)
    assert not sent("another")
    client.announce("subset", subset=[NORM])
    whole = source.tensors
    source.tensors = {NORM: whole[NORM]}
    delta_trainer.send_weights()
    source.tensors = whole
    assert not sent("after a subset")
    step()
    assert sent("a delta again")


def test_a_client_that_takes_no_manifest_gets_whole_versions(
    client: ServerClient,
    source: CheckpointSource,
    info: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Four:
        """Upstream's calls alone."""

        def init_weight_transfer_engine(self, init_info: Any) -> None:
            client.init_weight_transfer_engine(init_info)

        def start_weight_update(self) -> None:
            client.start_weight_update()

        def update_weights(self, update_info: Any) -> None:
            client.update_weights(update_info)

        def finish_weight_update(self) -> None:
            client.finish_weight_update()

    with pytest.raises(ConfigError, match="manifest"):
        joined(Four(), source, delta="always")
    trainer = joined(Four(), source, delta="auto")
    assert "whole versions are sent" in caplog.text
    for _ in range(2):
        before = info()["epoch"]
        trainer.send_weights()
        assert info()["epoch"] == before + 1
    assert trainer.deltas.last is None
    trainer.shutdown()
    client.shutdown_weight_transfer_engine()
