"""Code in the engine's own process loads into the model, as TRL's trainers do.

With `--inflight-adopt direct`, what it loads becomes a version. TRL calls
`load_weights` with one tensor at a time and then resets the prefix cache.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import served, tensors_of
from tests.e2e.test_out_of_band_writes import model_of
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import Streams, add, answers, call, prompt, publish
from tests.support.frameworks.core import extended_core
from vllm.inflight.errors import UpdateBusy, WeightsMismatch

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.engines.user_extension.Extension"


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path]) -> Iterator[EngineCore]:
    flags = {"additional_config": {"inflight": {"adopt": "direct"}}}
    with extended_core(folders["old"], EXTENSION, **flags) as core:
        yield core


def one_by_one(core: EngineCore, tensors: dict[str, torch.Tensor]) -> None:
    """TRL colocated, OnlineDPO."""
    for name, tensor in tensors.items():
        model_of(core).load_weights([(name, tensor)])


def all_at_once(core: EngineCore, tensors: dict[str, torch.Tensor]) -> None:
    """ms-swift colocated."""
    model_of(core).load_weights(tensors.items())


def as_a_stream(core: EngineCore, tensors: dict[str, torch.Tensor]) -> None:
    """A generator, whose tensor is gone when the next one is asked for."""
    memory = torch.empty(1 << 17, dtype=torch.uint8)

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            lent = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            yield name, lent.copy_(tensor)

    model_of(core).load_weights(pairs())


@pytest.mark.parametrize("load", [one_by_one, all_at_once, as_a_stream])
@pytest.mark.parametrize("is_reset", [True, False], ids=["a reset", "a step"])
def test_loads_of_all_tensors_become_a_version_at_a_reset_or_at_the_next_step(
    core: EngineCore,
    folders: dict[str, Path],
    load: Any,
    is_reset: bool,
    record_property: Callable[[str, object], None],
) -> None:
    digest = publish(core, folders["new"], "new")["digest"]
    expected = answers(core, "expected"), parameters(core)
    publish(core, folders["old"], "old")
    load(core, tensors_of(folders["new"]))
    assert served(core)[0] == "old"
    if is_reset:
        core.reset_prefix_cache()
        assert served(core)[2] == digest
    assert answers(core, "after") == expected[0] and parameters(core) == expected[1]
    label, epoch, committed = served(core)
    assert (label, committed) == (f"update-{epoch}", digest)
    record_property("digest", "equal")
    assert call(core, "rollback")["weight_version"] == "old"


def test_a_request_goes_on_with_the_new_version_after_a_reset(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    add(core, "runs", prompt(3))
    streams = Streams(core).step(8)
    one_by_one(core, tensors_of(folders["new"]))
    core.reset_prefix_cache()
    streams.run()
    stamps = streams.stamps["runs"]
    assert set(stamps) == {"old", served(core)[0]}


@pytest.mark.parametrize("is_reset", [True, False], ids=["a reset", "a step"])
def test_loads_that_lack_a_tensor_change_nothing(
    core: EngineCore, folders: dict[str, Path], is_reset: bool
) -> None:
    before, said = served(core), answers(core, "before")
    tensors = tensors_of(folders["new"])
    del tensors["model.norm.weight"]
    one_by_one(core, tensors)
    if is_reset:
        with pytest.raises(WeightsMismatch) as raised:
            core.reset_prefix_cache()
        assert raised.value.tensors == ["model.norm.weight"]
    assert answers(core, "after") == said and served(core) == before
    assert call(core, "status")["active"] is None


def test_a_tensor_that_does_not_fit_is_rejected_where_it_is_loaded(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    before, said = served(core), answers(core, "before")
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight"):
        model_of(core).load_weights([("model.norm.weight", torch.zeros(3))])
    assert answers(core, "after") == said and served(core) == before


def test_loads_during_an_update_of_another_client_are_rejected(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    call(core, "start", transport="local")
    with pytest.raises(UpdateBusy):
        all_at_once(core, tensors_of(folders["new"]))
    call(core, "abort")
