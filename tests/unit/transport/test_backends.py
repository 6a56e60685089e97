"""The backends as upstream sees them: registers, infos, and its trainer's two calls."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest
import torch

from tests.support.trainers.sharded import mixtral
from tests.support.transports.peers import (
    BUCKET_BYTES,
    HOST,
    digests,
    engine,
    init_info,
    tensors,
)
from vllm.inflight import upstream
from vllm.inflight.errors import ConfigError, TransferFault
from vllm.inflight.patch import BACKENDS
from vllm.inflight.releases.table import adapter
from vllm.inflight.trainer.sources import stream as sources
from vllm.inflight.transport import base as transports
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.collective import trainer_engine as trainer
from vllm.inflight.transport.collective.receiver_engine import GlooEngine, NcclEngine
from vllm.inflight.transport.cuda_ipc import trainer_engine as ipc_trainer
from vllm.inflight.transport.files.receiver_engine import LocalEngine
from vllm.inflight.transport.weight_source import Weights


@pytest.mark.parametrize("cls", [GlooEngine, NcclEngine, LocalEngine])
def test_every_engine_class_is_one_of_upstreams_and_has_a_cancellation_check(cls):
    assert issubclass(cls, upstream.WeightTransferEngine)
    assert issubclass(cls, StagedEngine)
    assert not cls.__abstractmethods__
    assert cls.cancelled() is False


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank_offset": 0}, "rank_offset must be at least 1"),
        ({"world_size": 1}, "world_size counts the trainer and every worker"),
        ({"bucket_bytes": 1000}, "bucket_bytes must be a multiple of 256"),
        ({"bucket_bytes": 0}, "bucket_bytes must be a multiple of 256"),
        ({"num_buckets": 0}, "num_buckets must be positive"),
        ({"num_buckets": 2.5}, "num_buckets must be a whole number"),
        ({"master_port": 70000}, "master_port must be 1 to 65535"),
        ({"master_port": 0}, "master_port must be 1 to 65535"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"timeout_s": "5"}, "timeout_s must be above 0"),
        ({"timeout_s": float("inf")}, "timeout_s must be above 0 and at most 86400"),
        ({"target_bucket_ms": -1}, "target_bucket_ms must be positive"),
        ({"packed": False}, "packed=False is not offered"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_an_invalid_init_info_is_rejected_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        engine().parse_init_info(init_info(1, **changes))


def test_an_init_info_needs_only_the_trainers_address_and_the_world_size():
    least = {"master_address": HOST, "master_port": 1, "world_size": 2}
    assert GlooEngine.init_info_cls(**least).bucket_bytes == 16 << 20
    assert NcclEngine.init_info_cls(**least).bucket_bytes == 256 << 20
    assert NcclEngine.init_info_cls(**least).terms.wire == "nccl"


def test_an_update_info_is_parsed_in_upstreams_format():
    info = engine().parse_update_info(
        {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    )
    assert info.tensor_list.sizes == [12]
    with pytest.raises(ValueError, match="'shapes' has 0 entries"):
        engine().parse_update_info({"names": ["a"], "dtype_names": [""], "shapes": []})


REGISTERED = sorted(upstream.WeightTransferEngineFactory._registry)
READ = {"nccl", "ipc"}
"""vLLM's own that were read, and run by tests/gpu/test_upstream_transports.py."""
OF_TESTS = {"other", "keeping", "benchmark-file", "benchmark-memory"}
"""Registered by tests and benchmarks, where this process has imported them."""


@pytest.mark.parametrize("backend", REGISTERED)
def test_a_registered_backend_is_known_to_hand_whole_tensors_or_rejected_by_name(
    backend,
):
    reason = transports.transport_obstacle(backend)
    if backend in READ | BACKENDS.keys() | OF_TESTS:
        assert reason is None
    else:
        assert reason is not None
        assert f"weight transfer backend {backend!r}" in reason


def test_the_backends_that_a_release_of_vllm_brings_are_these():
    """One that a new release brings is refused, and noticed here."""
    brought = set(REGISTERED) - BACKENDS.keys() - OF_TESTS
    assert brought - READ == {"sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress"}


class Whole:
    """A model that notes what its loader is given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, weights) -> None:
        self.given += weights


def test_vllms_nccl_backend_hands_over_whole_tensors_and_patches_nothing(
    monkeypatch,
):
    """Its packed form, and `ipc`, take a GPU; see the tests there."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    copy, worker, model = torch.Tensor.copy_, engine(), Whole()
    dense = upstream.NCCLWeightTransferEngine(
        None, worker.vllm_config, worker.device, model
    )
    seen_copies = set()

    class Group:
        def broadcast(self, tensor, src, stream):
            seen_copies.add(torch.Tensor.copy_)
            tensor.fill_(src + 1)

    dense.model_update_group = Group()
    shapes = {"a": [2, 3], "b": [4]}
    dense.receive_weights(
        dense.parse_update_info(
            {
                "names": list(shapes),
                "dtype_names": ["bfloat16"] * 2,
                "shapes": list(shapes.values()),
            }
        )
    )
    assert {name: list(t.shape) for name, t in model.given} == shapes
    assert all((tensor == 1).all() for _, tensor in model.given)
    assert seen_copies == {copy} == {torch.Tensor.copy_}


class VerlDeltaIpc(upstream.WeightTransferEngine):
    """A backend of a framework's that sends what has changed."""


class Derived(upstream.NCCLWeightTransferEngine):
    """vLLM's, with a body of somebody's own: what was read is not what runs."""


class Declared(VerlDeltaIpc):
    hands_whole_tensors = True


class Withdrawn(StagedEngine):
    hands_whole_tensors = False


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [
        (VerlDeltaIpc, True),
        (Derived, True),
        (Declared, False),
        (Withdrawn, True),
        (GlooEngine, False),
    ],
)
def test_a_foreign_backend_is_accepted_only_if_its_class_declares_whole_tensors(
    monkeypatch, kind, is_refused
):
    factory = upstream.WeightTransferEngineFactory
    monkeypatch.setattr(factory, "_registry", {"verl_delta_ipc": lambda: kind})
    reason = transports.transport_obstacle("verl_delta_ipc")
    assert (reason is not None) is is_refused
    if is_refused:
        assert f"'verl_delta_ipc' ({__name__}.{kind.__name__})" in reason
        assert "set hands_whole_tensors = True on the class" in reason


def test_a_backend_that_cannot_be_imported_is_rejected_and_an_unknown_one_left_to_vllm(
    monkeypatch,
):
    def missing():
        raise ImportError("no module named it")

    factory = upstream.WeightTransferEngineFactory
    monkeypatch.setattr(factory, "_registry", {"it": missing})
    assert "'it' cannot be loaded: no module named it" in str(
        transports.transport_obstacle("it")
    )
    assert transports.transport_obstacle("nobody's") is None


class Client:
    """Stands for the engines; JSON in between, as over HTTP."""

    def __init__(self, worker):
        self.worker = worker
        self.calls: list[str] = []
        self.refusal: Exception | None = None
        self.is_late = False
        """Whether it refuses what it has received."""

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")
        info = self.worker.parse_init_info(json.loads(json.dumps(init_info)))
        self.worker.init_transfer_engine(info)

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update_info):
        self.calls.append("update")
        if self.refusal is not None and not self.is_late:
            raise self.refusal
        info = self.worker.parse_update_info(json.loads(json.dumps(update_info)))
        self.worker.receive_weights(info)
        if self.refusal is not None:
            raise self.refusal

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")


class OneCall(Client):
    """Opens and commits an update in the call that brings its tensors."""

    def update_weights(self, update_info, *, start=None, finish=None):
        self.calls.append(("start", start, "finish", finish))
        super().update_weights(update_info)


@pytest.fixture
def module():
    module = torch.nn.Module()
    for name, tensor in tensors(4).items():
        wanted = torch.nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(name, wanted)
    return module


@pytest.fixture(params=[Client])
def client(request):
    client = request.param(engine())
    yield client
    client.worker.shutdown()


def begin(client, module, **changes):
    from vllm.distributed.weight_transfer import ModuleSource

    info = trainer.GlooTrainerInitInfo(
        HOST, 0, 2, bucket_bytes=BUCKET_BYTES, rank=0, **changes
    )
    return upstream.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=ModuleSource(module)
    )


def test_upstreams_trainer_can_drive_our_backend(client, module):
    sending = begin(client, module)
    for _ in range(2):
        sending.send_weights()
    sending.shutdown()
    assert client.calls == ["init", *["start", "update", "finish"] * 2]
    loaded = client.worker.model.loaded
    assert digests(loaded.items()) == digests(module.named_parameters())


@pytest.mark.parametrize("client", [OneCall], indirect=True)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_client_that_can_gets_one_call_for_an_update(client, module, is_late):
    sending = begin(client, module)
    sending.send_weights()
    client.is_late, client.refusal = is_late, LookupError("not now")
    with pytest.raises(LookupError, match="not now"):
        sending.send_weights()
    client.refusal = None
    sending.send_weights()
    sending.shutdown()
    update = [("start", {}, "finish", {}), "update"]
    assert client.calls == ["init", *update, *update, "init", *update]
    loaded = client.worker.model.loaded
    assert digests(loaded.items()) == digests(module.named_parameters())


@pytest.mark.parametrize("is_late", [False, True])
def test_an_engines_rejection_is_what_the_trainer_raises_and_the_next_update_works(
    client, module, is_late
):
    sending = begin(client, module)
    client.is_late = is_late
    client.refusal = LookupError("not now")
    with pytest.raises(LookupError, match="not now"):
        sending.send_weights()
    client.refusal = None
    sending.send_weights()
    sending.shutdown()
    update = ["start", "update"]
    assert client.calls == ["init", *update, "init", *update, "finish"]
    loaded = client.worker.model.loaded
    assert digests(loaded.items()) == digests(module.named_parameters())


def test_a_rejected_rank_gathers_to_the_end_with_the_others(client, module):
    sending = begin(client, module)
    num_gathered, source = 0, sending.source
    reader = adapter("weight source")

    class Counting(reader):
        def read_facts(self):
            return reader.facts_of(source)

        def read_tensors(self):
            nonlocal num_gathered
            for pair in reader.tensors_of(source):
                num_gathered += 1
                yield pair

    sending.source = Counting()
    client.refusal = LookupError("not now")
    with pytest.raises(LookupError, match="not now"):
        sending.send_weights()
    sending.shutdown()
    assert num_gathered == len(reader.facts_of(source))


def test_an_engine_that_cannot_join_is_named_to_the_trainer(client, module):
    client.worker.device = torch.device("meta")
    with pytest.raises(Exception, match="inflight_gloo receives on cpu"):
        begin(client, module)


def test_a_trainer_rank_that_does_not_send_only_gathers(client, module):
    from vllm.distributed.weight_transfer import ModuleSource

    info = trainer.GlooTrainerInitInfo(HOST, 0, 2, rank=1)
    idle = upstream.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=ModuleSource(module)
    )
    idle.send_weights()
    assert client.calls == []


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        (
            trainer.GlooTrainerInitInfo(HOST, 0, 2, rank=1),
            trainer.BroadcastTrainer,
        ),
        (
            trainer.NcclTrainerInitInfo(HOST, 0, 2, rank=1),
            trainer.BroadcastTrainer,
        ),
    ],
)
def test_every_backend_has_a_trainer(info, kind, client):
    made = upstream.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=Weights({"a": torch.ones(1)})
    )
    assert type(made) is kind


def test_entering_a_trainer_uses_no_private_registry_of_upstream():
    for module in (trainer, ipc_trainer):
        assert "._registry" not in inspect.getsource(module)


def test_a_model_in_memory_is_sent_as_its_checkpoint(client):
    model = mixtral()
    info = trainer.GlooTrainerInitInfo(
        HOST, 0, 2, bucket_bytes=BUCKET_BYTES, timeout_s=30.0, rank=0
    )
    source = Weights(model, name_map=lambda name: f"sent.{name}")
    sending = upstream.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=source
    )
    sending.send_weights()
    sending.shutdown()
    expected = {f"sent.{n}": t.clone() for n, t in sources.tensors(model)}
    assert any("experts.1.w2" in name for name in expected)
    loaded = client.worker.model.loaded
    assert digests(loaded.items()) == digests(expected.items())


def test_a_source_that_can_be_read_only_once_is_rejected():
    with pytest.raises(ConfigError, match="only once"):
        Weights(iter([("a", torch.ones(1))]))


def test_a_cpu_engine_has_no_nccl():
    worker = engine()
    nccl = NcclEngine(None, worker.vllm_config, worker.device, worker.model)
    info = nccl.parse_init_info(init_info(1))
    with pytest.raises(Exception, match="inflight_nccl receives on cuda"):
        nccl.init_transfer_engine(info)


@pytest.mark.seconds
def test_the_trainers_end_imports_no_engine_of_vllm():
    code = (
        "import sys\n"
        "import vllm.inflight.transport.buckets.sender, vllm.inflight.transport.group\n"
        "import vllm.inflight.transport.collective.gloo\n"
        "import vllm.inflight.transport.collective.nccl\n"
        "print([m for m in sys.modules if m.startswith(('vllm.config', "
        "'vllm.distributed', 'vllm.inflight.upstream', 'vllm.v1'))])\n"
    )
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip().splitlines()[-1] == "[]"


def test_a_restarted_trainer_can_connect_to_the_same_worker(client, module):
    first = begin(client, module)
    first.shutdown()
    with pytest.raises(TransferFault, match="has left the group"):
        client.update_weights(
            {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
        )
    second = begin(client, module)
    second.send_weights()
    second.shutdown()
