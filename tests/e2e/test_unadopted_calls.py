"""Calls that are not adopted write into the live weights, as out-of-band writes.

As in test_out_of_band_writes.py, the packing of vLLM's CPU build is off.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import HOST, served, tensors_of
from tests.support.engines.bare_core import answers, call, publish
from tests.support.engines.unpacked import unpacked
from tests.support.frameworks.core import extended_core
from tests.support.trainers.store_group import StoreTrainer, store_trainer
from vllm.inflight.engine.compat import adoption

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.frameworks.openrlhf.Extension"


def test_an_extension_without_a_known_call_is_named_at_the_start(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine below: vLLM adds an extension to its own class."""
    own, told = "tests.support.engines.user_extension.Extension", []
    monkeypatch.setattr(adoption.logger, "info", lambda *line: told.append(line))
    with extended_core(folders["old"], own) as core:
        assert any("no known call" in line[0] and line[1] == own for line in told)
        assert call(core, "info")["worker_extension"] == {"name": own, "calls": []}


@pytest.fixture(scope="module", params=[None, "off"], ids=["default", "off"])
def adopt(request: pytest.FixtureRequest) -> Any:
    """The value of --inflight-adopt, if it is given."""
    return request.param


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path], adopt: str | None) -> Iterator[EngineCore]:
    with unpacked():
        given = {} if adopt is None else {"adopt": adopt}
        flags = {"additional_config": {"inflight": given}}
        with extended_core(folders["old"], EXTENSION, **flags) as core:
            yield core


@pytest.fixture
def trainer(core: EngineCore) -> Iterator[StoreTrainer]:
    with store_trainer() as trainer:
        join = HOST, trainer.port, 1, 2, "openrlhf"
        core.collective_rpc("init_process_group", args=join)
        yield trainer


def send(core: EngineCore, trainer: StoreTrainer, folder: Path, call: Any) -> None:
    """One call for each tensor, the last one marked."""
    tensors = tensors_of(folder)
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        trainer.broadcast(tensor)
        told = name, tensor.dtype, tensor.shape, number == len(tensors)
        call(told)


@pytest.mark.parametrize("adopt", ["off"], indirect=True)
def test_with_adopt_off_each_call_writes_into_the_live_weights(
    core: EngineCore, trainer: StoreTrainer, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = answers(core, "expected")
    publish(core, folders["old"], "old")
    before = served(core)[1]
    send(
        core,
        trainer,
        folders["new"],
        lambda told: core.collective_rpc("update_weight", args=told),
    )
    assert answers(core, "after") == expected
    label, epoch, digest = served(core)
    assert (label, digest) == (f"untracked-{epoch}", None)
    assert epoch == before + 25
    assert call(core, "info")["previous"] is None


@pytest.mark.parametrize("adopt", [None], indirect=True)
def test_a_function_in_place_of_a_name_is_not_adopted(
    core: EngineCore, trainer: StoreTrainer, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = answers(core, "expected")
    publish(core, folders["old"], "old")
    send(
        core,
        trainer,
        folders["new"],
        lambda told: core.collective_rpc(lambda worker: worker.update_weight(*told)),
    )
    assert answers(core, "after") == expected
    assert served(core)[2] is None and call(core, "info")["previous"] is None


@pytest.mark.parametrize("adopt", [None], indirect=True)
def test_weights_that_a_sleep_has_given_up_are_filled_in_place(
    core: EngineCore, trainer: StoreTrainer, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = answers(core, "expected")
    core.vllm_config.model_config.enable_sleep_mode = True
    core.sleep(2)
    core.wake_up()
    assert call(core, "info")["weights"] == "gone"
    send(
        core,
        trainer,
        folders["new"],
        lambda told: core.collective_rpc("update_weight", args=told),
    )
    assert call(core, "info")["weights"] == "live"
    assert answers(core, "after") == expected and served(core)[2] is None
    core.vllm_config.model_config.enable_sleep_mode = False
