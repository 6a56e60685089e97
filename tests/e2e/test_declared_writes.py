"""What the table of known calls says of calls that write into the live weights.

As in test_out_of_band_writes.py, the packing of vLLM's CPU build is off.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import served, tensors_of
from tests.e2e.test_sleep import refused, says
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import Streams, add, call, prompt, publish
from tests.support.engines.unpacked import unpacked
from tests.support.frameworks.by_hand import (
    SENT,
    NemoRL,
    PrimeRLNixl,
    _received,
)
from tests.support.frameworks.core import extended_core
from vllm.inflight.worker.integrity import fingerprint

pytestmark = pytest.mark.engine

LARGE = "model.layers.0.mlp.gate_up_proj.weight"
COUNTS = "outside_writes"


class Extension(NemoRL, PrimeRLNixl):
    """The calls of two frameworks."""

    def areal_update_weights(self: Any, model_path: str) -> tuple[bool, str]:
        """AReaL's call, which fails after half of its tensors."""
        self.model_runner.model.load_weights(list(_received()))
        return False, "the rest did not come"

    def receive_weight_update(self: Any, request_json: str) -> None:
        self.model_runner.model.load_weights(list(_received()))


@pytest.fixture(scope="module", params=[None, "off"], ids=["default", "off"])
def adopt(request: pytest.FixtureRequest) -> Any:
    """The value of --inflight-adopt, if it is given."""
    return request.param


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path], adopt: str | None) -> Iterator[EngineCore]:
    with unpacked():
        given = {} if adopt is None else {"adopt": adopt}
        flags = {"additional_config": {"inflight": given}}
        name = f"{__name__}.{Extension.__name__}"
        with extended_core(folders["old"], name, **flags) as core:
            yield core


@pytest.fixture(autouse=True)
def nothing_sent() -> Iterator[None]:
    SENT.clear()
    yield
    SENT.clear()


def counted(core: EngineCore) -> dict[str, int]:
    """The writes that `/metrics` counts, by the call that has made them."""
    return dict(call(core, "metrics")[COUNTS])


def changed_unseen(core: EngineCore) -> torch.Tensor:
    """A parameter with one other number, where no sample of it looks."""
    model = core.model_executor.driver_worker.worker.model_runner.model
    param = dict(model.named_parameters())[LARGE].data
    for place in range(param.numel()):
        changed = param.clone()
        changed.view(-1)[place] += 1
        if fingerprint.is_same(
            fingerprint.sample([param]), fingerprint.sample([changed])
        ):
            return changed
    raise AssertionError("every number of it is in the sample")


@pytest.mark.parametrize(
    ("method", "args", "result"),
    [
        ("nccl_reshard_refit", (), True),
        (
            "update_weights_from_decoded_sparse_payload",
            (b"one", b"two"),
            {"num_payloads": 2},
        ),
    ],
)
def test_a_declared_write_begins_a_version_also_if_nothing_shows_it(
    core: EngineCore, folders: dict[str, Path], method: str, args: Any, result: Any
) -> None:
    publish(core, folders["new"], "new")
    publish(core, folders["old"], "old")
    before, counts, held = served(core), counted(core), parameters(core)
    SENT.append((LARGE, changed_unseen(core)))
    assert core.collective_rpc(method, args=args) == [result]
    label, epoch, digest = served(core)
    assert (label, epoch, digest) == (f"untracked-{epoch}", before[1] + 1, None)
    assert refused(core, "rollback") == "nothing_to_roll_back"
    now = parameters(core)
    assert [name for name in now if now[name] != held[name]] == [LARGE]
    assert counted(core) == counts | {method: counts.get(method, 0) + 1}


def test_a_worker_that_keeps_live_tensors_writes_in_place_and_is_not_adopted(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    """prime-rl's worker for NIXL has the method of its worker for NCCL."""
    publish(core, folders["new"], "new")
    expected = parameters(core)
    model = core.model_executor.driver_worker.worker.model_runner.model
    SENT.extend((n, p.detach().clone()) for n, p in model.named_parameters())
    publish(core, folders["old"], "old")
    add(core, "runs", prompt(3))
    streams = Streams(core).step(8)
    num = len(streams.tokens["runs"]) + len(core.batch_queue or ())
    assert core.collective_rpc("update_weights_from_path", args=("step_1",)) == [None]
    label, epoch, digest = served(core)
    assert (label, digest) == (f"untracked-{epoch}", None)
    assert parameters(core) == expected
    streams.run()
    assert streams.stamps["runs"] == ["old"] * num + [label] * (40 - num)


@pytest.mark.parametrize("adopt", ["off"], indirect=True)
def test_a_write_has_the_label_that_its_call_gives(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    SENT.extend(tensors_of(folders["new"]).items())
    told = '{"version": 7, "parameters_info": []}'
    core.collective_rpc("receive_weight_update", args=(told,))
    label, _, digest = served(core)
    assert (label, digest) == ("7", None)
    assert call(core, "info")["previous"] is None


@pytest.mark.parametrize(
    ("method", "args", "why"),
    [
        ("areal_update_weights", ("step_5",), "the rest did not come"),
        ("update_weights_from_collective", (), "it returned False"),
        ("nccl_reshard_refit", (), "it returned False"),
    ],
)
@pytest.mark.parametrize("adopt", ["off"], indirect=True)
def test_a_failure_that_is_a_result_leaves_no_weights_to_decode_with(
    core: EngineCore, folders: dict[str, Path], method: str, args: Any, why: str
) -> None:
    """The method has written a part, and the rest is of the version before."""
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    publish(core, folders["old"], "old")
    wrong = [("model.no.weight", torch.zeros(1))]
    pairs = list(tensors_of(folders["new"]).items())[:9]
    SENT.extend(
        {"areal_update_weights": pairs, "nccl_reshard_refit": wrong}.get(
            method, pairs + wrong
        )
    )
    (result,) = core.collective_rpc(method, args=args)
    assert result is False or result[0] is False
    told = call(core, "info")
    facts = told["weights"], told["digest"], told["previous"]
    assert facts == ("gone", None, None)
    assert told["weight_version"] == f"untracked-{told['epoch']}"
    assert method in told["weights_detail"] and why in told["weights_detail"]
    assert call(core, "health")["weights_detail"] == told["weights_detail"]
    add(core, "waits", prompt(3))
    assert Streams(core).step(3).tokens == {}
    publish(core, folders["new"], "again")
    assert Streams(core).run().tokens["waits"] == expected
