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
from vllm.inflight.errors import Forbidden, Unauthorized, WeightsMismatch, WrongPhase
from vllm.inflight.trainer import ServerClient
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


def joined(client: Any, source: CheckpointSource) -> Any:
    """Upstream's trainer, in a group with the server's workers."""
    info = GlooTrainerInitInfo(
        rank=0,
        master_address=HOST,
        master_port=0,
        world_size=2,
        bucket_bytes=1 << 16,
        timeout_s=30.0,
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
