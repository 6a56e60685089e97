"""Known calls that cannot become updates: rejected, or honest out-of-band writes.

Where `--inflight-adopt` is given, such a call is rejected by name. Else it writes into
the live weights, as on plain vLLM.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import served, tensors_of
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import answers, call, publish
from tests.support.engines.unpacked import unpacked
from tests.support.frameworks.by_hand import SENT, _received
from tests.support.frameworks.core import extended_core
from vllm.inflight.engine.compat import adoption
from vllm.inflight.engine.integrity import outside_writes
from vllm.inflight.errors import Conflict

pytestmark = pytest.mark.engine

VERL, SPARSE, PIPELINE, SKYRL = (
    "update_weights_from_ipc",
    "update_weights_from_decoded_sparse_payload",
    "receive_weight_update",
    "skyrl_start_weight_update",
)
TOLD = '{"version": 7, "parameters_info": []}'


class Extension:
    """Calls of several frameworks, which note that they ran."""

    def update_weights_from_ipc(
        self: Any, peft_config: Any, base_sync_done: bool, use_shm: bool = False
    ) -> str:
        return "an adapter"

    def update_weights_from_decoded_sparse_payload(self: Any, *payloads: Any) -> str:
        return "a delta"

    def receive_weight_update(self: Any, request_json: str) -> str:
        self.model_runner.model.load_weights(list(_received()))
        return "weights"

    def skyrl_start_weight_update(self: Any, is_checkpoint_format: bool) -> str:
        return "begun"


ADAPTER = (VERL, ({"r": 8}, True, False), "it brings an adapter", "an adapter")
DELTA = (SPARSE, (b"some",), "writes into the live model by itself", "a delta")
KERNEL = (SKYRL, (False,), "kernel format", "begun")
WEIGHTS = (PIPELINE, (TOLD,), "--inflight-staging off", "weights")


@pytest.fixture(scope="module", params=[None, "on"], ids=["default", "on"])
def adopt(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=["auto", "off"])
def staging(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(
    folders: dict[str, Path], adopt: str | None, staging: str
) -> Iterator[EngineCore]:
    given = {"staging": staging} | ({} if adopt is None else {"adopt": adopt})
    name = f"{__name__}.{Extension.__name__}"
    with unpacked():
        flags = {"additional_config": {"inflight": given}}
        with extended_core(folders["old"], name, **flags) as core:
            yield core


def counted(core: EngineCore, method: str) -> int:
    return int(call(core, "metrics")["outside_writes"].get(method, 0))


def test_the_engine_says_which_known_calls_it_adopts(
    engine: EngineCore, staging: str
) -> None:
    told = call(engine, "info")["worker_extension"]
    assert told["name"] == f"{__name__}.{Extension.__name__}"
    why = {each["call"].partition("(")[0]: each["why"] for each in told["calls"]}
    assert why.keys() >= {VERL, SPARSE, PIPELINE, SKYRL}
    assert "by itself" in why[SPARSE]
    assert (why[PIPELINE] is None) == (staging == "auto")


@pytest.mark.parametrize(
    ("method", "args", "why", "result"),
    [ADAPTER, DELTA, KERNEL],
    ids=["adapter", "delta", "kernel format"],
)
@pytest.mark.parametrize("staging", ["auto"], indirect=True)
@pytest.mark.parametrize("adopt", ["on"], indirect=True)
def test_what_cannot_be_adopted_is_rejected_where_adoption_was_asked_for(
    engine: EngineCore, method: str, args: Any, why: str, result: str
) -> None:
    before, held = served(engine), parameters(engine)
    with pytest.raises(Conflict, match=why) as raised:
        engine.collective_rpc(method, args=args)
    assert method in raised.value.message
    assert "without --inflight-adopt" in raised.value.remedy
    assert (served(engine), parameters(engine)) == (before, held)
    assert counted(engine, method) == 0


@pytest.mark.parametrize("staging", ["off"], indirect=True)
@pytest.mark.parametrize("adopt", ["on"], indirect=True)
def test_without_staging_a_call_is_rejected_where_adoption_was_asked_for(
    engine: EngineCore, folders: dict[str, Path]
) -> None:
    before, said = served(engine), answers(engine, "before")
    SENT.extend(tensors_of(folders["new"]).items())
    with pytest.raises(Conflict, match=r"receive_weight_update .* cannot be updated"):
        engine.collective_rpc(PIPELINE, args=(TOLD,))
    SENT.clear()
    assert served(engine) == before and answers(engine, "after") == said


@pytest.mark.parametrize("staging", ["auto"], indirect=True)
@pytest.mark.parametrize("adopt", ["on"], indirect=True)
def test_weights_that_are_gone_are_not_filled_where_adoption_was_asked_for(
    engine: EngineCore, folders: dict[str, Path]
) -> None:
    publish(engine, folders["old"], "old")
    engine.vllm_config.model_config.enable_sleep_mode = True
    engine.sleep(2)
    engine.wake_up()
    SENT.extend(tensors_of(folders["new"]).items())
    with pytest.raises(Conflict, match=PIPELINE):
        engine.collective_rpc(PIPELINE, args=(TOLD,))
    SENT.clear()
    assert call(engine, "info")["weights"] == "gone"
    publish(engine, folders["new"], "new")
    assert call(engine, "info")["weights"] == "live"
    engine.vllm_config.model_config.enable_sleep_mode = False


@pytest.mark.parametrize(
    ("method", "args", "why", "result"),
    [ADAPTER, DELTA],
    ids=["adapter", "delta"],
)
@pytest.mark.parametrize("staging", ["auto"], indirect=True)
@pytest.mark.parametrize("adopt", [None], indirect=True)
def test_by_default_it_is_an_out_of_band_write_with_an_honest_label(
    engine: EngineCore,
    folders: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    args: Any,
    why: str,
    result: str,
) -> None:
    publish(engine, folders["new"], "new")
    before, number = served(engine), counted(engine, method)
    monkeypatch.setattr(engine.vllm_inflight.adoption, "_said", set())
    for module in (adoption, outside_writes):
        monkeypatch.setattr(module.logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO):
        assert engine.collective_rpc(method, args=args) == [result]
    label, epoch, digest = served(engine)
    assert (label, epoch, digest) == (f"untracked-{epoch}", before[1] + 1, None)
    assert call(engine, "info")["previous"] is None
    assert counted(engine, method) == number + 1
    lines = [record.getMessage() for record in caplog.records]
    assert any(method in line and why in line for line in lines)
    assert any(method in line and label in line for line in lines)


@pytest.mark.parametrize("staging", ["off"], indirect=True)
@pytest.mark.parametrize("adopt", [None], indirect=True)
def test_without_staging_a_known_call_writes_in_place_and_says_so(
    engine: EngineCore, folders: dict[str, Path]
) -> None:
    said, before = answers(engine, "before"), served(engine)
    number = counted(engine, PIPELINE)
    SENT.extend(tensors_of(folders["new"]).items())
    assert engine.collective_rpc(PIPELINE, args=(TOLD,)) == ["weights"]
    label, epoch, digest = served(engine)
    assert (label, epoch, digest) == ("7", before[1] + 1, None)
    assert answers(engine, "after") != said
    assert counted(engine, PIPELINE) == number + 1


@pytest.mark.parametrize("staging", ["auto"], indirect=True)
@pytest.mark.parametrize("adopt", [None], indirect=True)
def test_a_call_that_has_failed_before_it_wrote_leaves_the_version_as_it_is(
    engine: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no trainer")

    publish(engine, folders["new"], "new")
    before = served(engine)
    worker = engine.model_executor.driver_worker.worker
    monkeypatch.setattr(type(worker), VERL, fail)
    with pytest.raises(ConnectionError):
        engine.collective_rpc(VERL, args=({"r": 8}, True, False))
    assert served(engine) == before and call(engine, "info")["weights"] == "live"
