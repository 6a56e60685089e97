"""What the pages name, or named in an earlier release, can be imported from there."""

import importlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.seconds

PACKAGE = "vllm.inflight"
TRANSPORT = "transport.collective.trainer_engine"

EARLIER = {
    "wire.trainer:NcclTrainerInitInfo": TRANSPORT,
    "wire.trainer:GlooTrainerInitInfo": TRANSPORT,
    "wire.trainer:ShardMeta": TRANSPORT,
    "wire.ipc_trainer:IpcTrainerInitInfo": "transport.cuda_ipc.trainer_engine",
    "wire.weights:Weights": "transport.weight_source",
    "wire.shards:Shard": "transport.buckets.tensor_slices",
    "trainer.source:take_part": "trainer.sources.stream",
    "ops:digest": "ops.digests",
}
"""Documented import path -> the module that defines it now."""

NOT_MOVED = (
    "errors:InflightError",
    "errors:UpdateBusy",
    "errors:VersionConflict",
    "errors:WeightsMismatch",
    "trainer:Outcome",
    "trainer:Publisher",
    "trainer:ServerClient",
)


@pytest.mark.parametrize(("path", "home"), EARLIER.items(), ids=EARLIER)
def test_an_earlier_import_path_gives_the_same_object(path, home):
    module, _, name = path.partition(":")
    earlier = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    defined = importlib.import_module(f"{PACKAGE}.{home}")
    assert earlier is getattr(defined, name)
    assert earlier.__module__ == defined.__name__


@pytest.mark.parametrize("path", NOT_MOVED)
def test_a_documented_import_path_stays(path):
    module, _, name = path.partition(":")
    assert hasattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def test_the_transport_exports_what_trainers_need():
    transport = importlib.import_module(f"{PACKAGE}.transport")
    for path, home in EARLIER.items():
        name = path.partition(":")[2]
        if home.startswith("transport."):
            defined = importlib.import_module(f"{PACKAGE}.{home}")
            assert getattr(transport, name) is getattr(defined, name)
            assert name in dir(transport)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = transport.Nothing


def test_importing_the_transport_imports_no_other_module():
    # In a process of its own: this one has imported everything by now.
    code = (
        "import sys, vllm; before = set(sys.modules); import vllm.inflight.transport; "
        "print(*sorted(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [PACKAGE, f"{PACKAGE}.transport"]
