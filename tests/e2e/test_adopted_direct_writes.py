"""An adopted method that writes into parameters by itself: a version, or an error.

As in test_out_of_band_writes.py, the packing of vLLM's CPU build is off. There a layer
has no memory during a load until it is complete. As on a GPU, every parameter has.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adoption import served, tensors_of
from tests.e2e.test_upstream_reloads import parameters
from tests.support.engines.bare_core import answers, call, publish
from tests.support.engines.mirrored import mirrored
from tests.support.engines.script import run_script
from tests.support.engines.unpacked import unpacked
from tests.support.frameworks import direct
from tests.support.frameworks.core import extended_core
from tests.support.frameworks.direct import (
    FAILING,
    HOSTILE,
    NORM,
    OTHER,
    READS_OTHER,
    TENSORS,
    WHOLE,
)
from vllm.inflight.errors import InflightError
from vllm.inflight.frameworks import table
from vllm.inflight.worker.shadow.parameters import is_mirrored
from vllm.inflight.worker.worker_state import WorkerState

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.frameworks.direct.Direct"

BUILDS: dict[str, Callable[[], AbstractContextManager[None]]] = (
    {"GPU": nullcontext}
    if torch.cuda.is_available()
    else {"CPU": unpacked, "as on a GPU": mirrored}
)
"""How engines are started."""
CAUGHT = (
    *("in a thread", "its own content", "out", "a mask", "other data"),
    *("another parameter", "not finite", "a part again", "half by load_weights"),
)
"""Of the ways that must change nothing, those whose error every run also handles: one
for each place that raises it."""


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> Iterator[None]:
    rows = (*direct.ROWS, *table.BUILT_IN)
    with BUILDS[request.param](), pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "BUILT_IN", rows)
        table.known_calls.cache_clear()
        yield
    table.known_calls.cache_clear()
    gc.collect()


@pytest.fixture(scope="module")
def booted(build: None, folders: dict[str, Path]) -> Iterator[EngineCore]:
    with extended_core(folders["old"], EXTENSION) as core:
        yield core


class New(NamedTuple):
    """The new weights: as a checkpoint, as they are served, and what they say."""

    checkpoint: dict[str, torch.Tensor]
    kernel: dict[str, torch.Tensor]
    seen: Any


@pytest.fixture(scope="module")
def new_weights(booted: EngineCore, folders: dict[str, Path]) -> New:
    publish(booted, folders["new"], "new")
    model = booted.model_executor.driver_worker.worker.model_runner.model
    kernel = {n: p.detach().clone() for n, p in model.named_parameters()}
    device = kernel[NORM].device
    checkpoint = {n: t.to(device) for n, t in tensors_of(folders["new"]).items()}
    return New(checkpoint, kernel, (parameters(booted), answers(booted, "expected")))


@pytest.fixture
def expected(
    new_weights: New, core: EngineCore, folders: dict[str, Path]
) -> Iterator[Any]:
    """What the new weights are, and say; what the engine serves is the old ones."""
    TENSORS.update(
        checkpoint=dict(new_weights.checkpoint), kernel=dict(new_weights.kernel)
    )
    # Once more: the shadow weights are older than those served.
    publish(core, folders["old"], "old")
    yield new_weights.seen
    TENSORS.clear()


def write(core: EngineCore, way: str, catches: bool = False) -> Any:
    return core.collective_rpc("tests_write", args=(way, catches))


@pytest.mark.parametrize("way", WHOLE)
def test_a_method_that_writes_every_parameter_itself_brings_a_version(
    core: EngineCore, folders: dict[str, Path], expected: Any, way: str
) -> None:
    of_files = publish(core, folders["old"], "old")["digest"]
    before, said = served(core), answers(core, "before")
    assert write(core, way) == [way]
    label, epoch, digest = served(core)
    assert (label, epoch) == (way, before[1] + 1)
    assert digest is not None and digest != of_files
    assert (parameters(core), answers(core, "after")) == expected
    assert call(core, "info")["previous"]["weight_version"] == "old"
    assert call(core, "rollback")["weight_version"] == "old"
    assert answers(core, "rolled back") == said
    assert write(core, way) == [way]
    assert served(core)[2] == digest, "the same weights have the same digest"
    publish(core, folders["old"], "old")
    assert answers(core, "after files") == said


@pytest.mark.parametrize(
    ("way", "catches"),
    [
        *(pytest.param(way, False, id=f"{way}-raises") for way in HOSTILE),
        *(pytest.param(way, True, id=f"{way}-catches") for way in CAUGHT),
        *(
            pytest.param(way, True, id=f"{way}-catches", marks=pytest.mark.slow)
            for way in HOSTILE
            if way not in CAUGHT
        ),
    ],
)
def test_what_is_not_each_element_once_is_rejected_by_name_and_changes_nothing(
    core: EngineCore, expected: Any, way: str, catches: bool
) -> None:
    before, said, held = served(core), answers(core, "before"), parameters(core)
    with pytest.raises(InflightError) as raised:
        write(core, way, catches)
    assert HOSTILE[way][1] in str(raised.value)
    assert served(core) == before and answers(core, "after") == said
    assert parameters(core) == held
    assert call(core, "status")["active"] is None
    assert write(core, "copies") == ["copies"]
    assert (parameters(core), answers(core, "then")) == expected


def test_what_a_method_has_written_may_be_read_where_it_is_in_place(
    core: EngineCore, expected: Any
) -> None:
    """A layer of the CPU build has its content when its load is complete."""
    way = "another's new content"
    before = served(core), parameters(core)
    worker = core.model_executor.driver_worker.worker
    stager: Any = WorkerState.of(worker).require_stager()
    if not is_mirrored(stager.shadow.module):
        with pytest.raises(InflightError, match=READS_OTHER):
            write(core, way)
        assert (served(core), parameters(core)) == before
        return
    assert write(core, way) == [way]
    params = dict(worker.model_runner.model.named_parameters())
    wanted = TENSORS["kernel"] | {NORM: TENSORS["kernel"][OTHER]}
    assert all(torch.equal(params[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("way", FAILING)
def test_what_a_failed_method_has_written_unseen_is_never_served(
    core: EngineCore,
    folders: dict[str, Path],
    expected: Any,
    tmp_path: Path,
    way: str,
) -> None:
    """Neither by a rollback, nor by a version that does not send that parameter."""
    other = "model.layers.0.input_layernorm.weight"
    save_file({other: tensors_of(folders["old"])[other]}, tmp_path / "one.safetensors")

    def publish_one() -> None:
        subset = {"format": 1, "subset": [other]}
        call(core, "start", transport="local", manifest=subset)
        call(core, "receive", update_info={"path": str(tmp_path)})
        call(core, "prepare")
        call(core, "commit", weight_version="one")

    publish_one()  # the shadow weights differ from those served in this tensor alone
    held = parameters(core)
    with pytest.raises(InflightError, match="the connection is broken"):
        write(core, f"fails: {way}")
    assert call(core, "info")["previous"] is None
    publish_one()
    assert parameters(core) == held
    assert call(core, "verify")["result"] == "equal"


def test_the_digest_is_of_what_is_served(core: EngineCore, expected: Any) -> None:
    write(core, "copies")
    first = served(core)[2]
    TENSORS["kernel"][NORM] = TENSORS["kernel"][NORM].clone()
    TENSORS["kernel"][NORM][3] *= 2
    write(core, "copies")
    assert served(core)[2] not in (first, None)


def test_no_delta_starts_from_a_version_that_a_method_has_written(
    core: EngineCore, expected: Any
) -> None:
    write(core, "copies")
    before = served(core)
    manifest = {"format": 1, "base": before[2], "tensors": {}}
    answer = core.inflight("start", {"transport": "local", "manifest": manifest})
    if not isinstance(answer, dict):
        answer = answer.result(timeout=30)
    assert "error" in answer and served(core) == before


def test_a_scrub_finds_what_changes_after_a_version_that_a_method_has_written(
    core: EngineCore, expected: Any
) -> None:
    write(core, "copies")
    assert call(core, "verify")["result"] == "equal"
    model = core.model_executor.driver_worker.worker.model_runner.model
    param = dict(model.named_parameters())[NORM]
    param.data.view(torch.int16)[0] ^= 1
    found = call(core, "verify")
    assert (found["result"], found["different"]) == ("different", [NORM])


def test_parts_of_a_version_are_written_in_several_calls(
    core: EngineCore, expected: Any
) -> None:
    names = list(TENSORS["kernel"])
    before = served(core)
    for name in names:
        assert served(core) == before
        is_last = name == names[-1]
        core.collective_rpc("tests_write_part", args=([name], is_last))
    assert (parameters(core), answers(core, "after")) == expected
    assert served(core)[2] is not None


def test_a_version_that_lacks_what_the_last_one_had_changes_nothing(
    core: EngineCore, expected: Any
) -> None:
    names = [name for name in TENSORS["kernel"] if name != NORM]
    core.collective_rpc("tests_write_part", args=(list(TENSORS["kernel"]), True))
    before = served(core), parameters(core)
    with pytest.raises(InflightError, match=r"model\.norm\.weight"):
        core.collective_rpc("tests_write_part", args=(names, True))
    assert (served(core), parameters(core)) == before


def test_each_call_that_is_repeated_is_rejected(
    core: EngineCore, expected: Any
) -> None:
    before = served(core), parameters(core)
    names = list(TENSORS["kernel"])
    core.collective_rpc("tests_write_part", args=(names[:3], False))
    with pytest.raises(InflightError, match=names[0].replace(".", r"\.")):
        core.collective_rpc("tests_write_part", args=(names[:3], False))
    assert (served(core), parameters(core)) == before


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_each_of_two_ranks_writes_its_own_parameters(
    folders: dict[str, Path], parallel: str
) -> None:
    check_two_ranks(folders, parallel)


def check_two_ranks(folders: dict[str, Path], parallel: str) -> None:
    room, bind = "tests.support.frameworks", {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    told = *folders.values(), parallel
    seen = run_script("direct_ranks", *told, room=room, env=bind)
    new, old = seen["new"][2], seen["old"][2]
    assert new != old
    error, label, digest, tokens = seen["step_1"]
    assert (error, label, tokens) == (None, "step_1", new) and digest is not None
    error, *after = seen["half"]
    assert "norm.weight" in error and after == seen["step_1"][1:]
    assert seen["step_2"] == [None, "step_2", digest, new]
    error, label, other, _ = seen["other"]
    assert (error, label) == (None, "other") and other not in (None, digest)
    assert seen["rolled back"] == ["step_2", digest, new]
    assert seen["scrub"] == "equal"
