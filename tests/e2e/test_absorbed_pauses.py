"""Absorbed pauses on a real engine core: frameworks' calls, and writes of all kinds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_adopted_by_hand import areal, pipelinerl, prime_rl, skyrl
from tests.e2e.test_adoption import labels_across, served, tensors_of
from tests.e2e.test_out_of_band_writes import model_of
from tests.e2e.test_sleep import says
from tests.support.engines.bare_core import (
    Streams,
    add,
    call,
    ended_soon,
    num_sampled,
    prompt,
    publish,
    request,
)
from tests.support.engines.core_door import Door
from tests.support.frameworks.by_hand import AReaL, PipelineRL, PrimeRL, SkyRL
from tests.support.frameworks.core import beside_steps, extended_core
from tests.support.frameworks.openrlhf import Extension as OpenRLHF
from vllm.inflight.engine.pause.absorption import Need

pytestmark = pytest.mark.engine

HAS_GPU = torch.cuda.is_available()
NUM_TOKENS = 1900 if HAS_GPU else 900
"""Of a request that has to outlive an update; a GPU takes a millisecond for each."""
SCHEDULING = ["async"] if HAS_GPU else ["sync", "async"]


class Extension(PrimeRL, SkyRL, AReaL, PipelineRL, OpenRLHF):
    """The calls of five frameworks, and one that nobody knows."""

    def tests_load(self: Any, tensors: dict[str, torch.Tensor], notes: Any) -> None:
        notes()
        self.model_runner.model.load_weights(tensors.items())
        notes()


@pytest.fixture(scope="module", params=SCHEDULING)
def booted(
    folders: dict[str, Path], request: pytest.FixtureRequest
) -> Iterator[EngineCore]:
    flags: dict[str, Any] = {
        "is_async": request.param == "async",
        "additional_config": {"inflight": {"pauses": "absorb"}},
        "max_model_len": 2048 if HAS_GPU else 1024,
        "enforce_eager": not HAS_GPU,
    }
    with extended_core(folders["old"], f"{__name__}.Extension", **flags) as core:
        yield core


def norms(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that the CPU build keeps as they are: it packs the others."""
    return {n: t for n, t in tensors_of(folder).items() if "norm" in n}


def running(core: EngineCore) -> Streams:
    add(core, "runs", prompt(3), max_tokens=NUM_TOKENS)
    return Streams(core).step(10)


def enforced(core: EngineCore) -> dict[str, int]:
    return dict(core.vllm_inflight.counts.enforced)


def in_turn(core: EngineCore, method: str, **body: Any) -> Any:
    """A control call of another thread than the one that takes steps."""
    return core.vllm_inflight.step_queue.run(lambda: call(core, method, **body))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("send", [prime_rl, skyrl, pipelinerl])
def test_a_frameworks_pause_around_its_adopted_update_stops_no_token(
    core: EngineCore, folders: dict[str, Path], send: Any, mode: str
) -> None:
    before = enforced(core)
    streams = running(core)

    def sync() -> list[int]:
        assert in_turn(core, "pause", mode=mode)["paused"] is True
        counts = [len(streams.tokens["runs"])]
        send(core, folders["new"], tensors_of(folders["new"]))
        counts.append(len(streams.tokens["runs"]))
        assert in_turn(core, "paused")["absorbed"] is True
        assert in_turn(core, "resume")["paused"] is False
        return counts

    first, last = beside_steps(streams, sync)
    assert last > first, "tokens came while the engine was told to pause"
    assert enforced(core) == before
    num = ended_soon(streams, "runs")
    labels_across(streams, "old", served(core)[0], num)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_framework_that_makes_a_call_for_each_tensor_stops_every_step(
    core: EngineCore, folders: dict[str, Path], mode: str
) -> None:
    """Beside decoding each of its calls would wait for steps."""
    before = enforced(core).get(Need.SINGLE_TENSORS, 0)
    streams = running(core)
    dtype = torch.bfloat16

    def sync() -> list[int]:
        in_turn(core, "pause", mode=mode, flush_cache=mode == "retract")
        counts = []
        *others, last = tensors_of(folders["new"]).items()
        for name, tensor in (*others, last):
            handle = {"the GPU": (lambda sent=tensor: sent, ())}
            args = name, dtype, tensor.shape, handle, name == last[0]
            assert core.collective_rpc("update_weight_cuda_ipc", args=args) == [None]
            counts.append(num_sampled(core, "runs"))
        stands_still(core)
        in_turn(core, "resume")
        return counts

    counts = beside_steps(streams, sync)
    assert len(counts) > 20 and len(set(counts[5:])) == 1
    assert enforced(core)[Need.SINGLE_TENSORS] == before + 1
    num = ended_soon(streams, "runs")
    labels_across(streams, "old", served(core)[0], num)


def test_a_worker_call_that_is_not_adopted_stops_every_step_meanwhile(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    streams = running(core)
    seen: list[tuple[int, bool]] = []

    def note() -> None:
        seen.append((num_sampled(core, "runs"), core.is_scheduler_paused()))

    def write() -> None:
        in_turn(core, "pause", mode="in_place")
        core.collective_rpc("tests_load", args=(norms(folders["new"]), note))
        stands_still(core)
        in_turn(core, "resume")

    beside_steps(streams, write)
    assert seen[0] == seen[1] and seen[0][1] is True
    num, labels = ended_soon(streams, "runs"), streams.stamps["runs"]
    assert len(labels) == num, "a token of the step in flight was lost"
    assert labels[: seen[0][0]] == ["old"] * seen[0][0]
    assert set(labels[seen[0][0] :]) == {served(core)[0]}


@pytest.mark.parametrize("is_between", [False, True], ids=["in a chunk", "between"])
def test_a_session_keeps_its_context_when_a_pause_that_retracts_takes_force(
    core: EngineCore, is_between: bool
) -> None:
    """It came after the pause. All other requests are retracted."""
    expected = Session(core, "expected", is_between=is_between)
    expected.ends()
    streams = running(core)
    in_turn(core, "pause", mode="retract")
    session = Session(core, "session", streams, is_between=is_between)
    before = core.vllm_inflight.counts.requests["retracted"]
    core.collective_rpc(lambda worker: None)
    assert in_turn(core, "paused")["mode"] == "retract"
    assert core.vllm_inflight.counts.requests["retracted"] == before + 1
    requests = core.scheduler.requests
    assert requests["runs"].num_computed_tokens == 0
    assert requests["session"].num_computed_tokens > 0
    in_turn(core, "resume")
    session.ends()
    assert session.said == expected.said
    num = ended_soon(streams, "runs")
    assert len(streams.tokens["runs"]) == num


class Session:
    """A session of two chunks, in the first one or behind it."""

    def __init__(
        self,
        core: EngineCore,
        name: str,
        streams: Streams | None = None,
        *,
        is_between: bool,
    ) -> None:
        self._core, self._name = core, name
        self._streams = streams or Streams(core)
        self._say(prompt(7))
        self._hear(8 if is_between else 3)

    def ends(self) -> None:
        """Say the second chunk, and hear all of both."""
        self._hear(8)
        self._say(prompt(8, 20))
        self._hear(16)
        self._say([0], is_last=True)
        self._streams.step(3)

    @property
    def said(self) -> list[int]:
        return self._streams.tokens[self._name]

    def _say(self, text: list[int], *, is_last: bool = False) -> None:
        made = request(self._name, text, max_tokens=8)
        made.resumable = not is_last
        self._core.add_request(*self._core.preprocess_add_request(made))

    def _hear(self, count: int) -> None:
        for _ in range(200):
            if len(self._streams.tokens.get(self._name, ())) >= count:
                break
            self._streams.step()


def stands_still(core: EngineCore) -> None:
    """Fails if a token is sampled in the next rounds of the stepping thread."""
    before = num_sampled(core, "runs")
    for _ in range(20):
        assert in_turn(core, "paused")["absorbed"] is False
    assert num_sampled(core, "runs") == before


def test_code_beside_the_engine_loads_while_no_step_runs(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL colocated: it calls `load_weights` of the model, once for each tensor."""
    before = enforced(core).get(Need.LOAD, 0)
    streams = running(core)
    pairs = list(norms(folders["new"]).items())

    def load() -> list[int]:
        in_turn(core, "pause", mode="in_place")
        counts = []
        for pair in pairs:
            model_of(core).load_weights([pair])
            counts.append(num_sampled(core, "runs"))
        stands_still(core)
        in_turn(core, "resume")
        return counts

    counts = beside_steps(streams, load)
    assert len(set(counts)) == 1, "a step ran between two tensors"
    assert enforced(core)[Need.LOAD] == before + 1
    num, labels = ended_soon(streams, "runs"), streams.stamps["runs"]
    assert len(labels) == num, "a token of the step in flight was lost"
    assert set(labels[: counts[0]]) == {"old"}
    assert set(labels[counts[0] :]) == {served(core)[0]} != {"old"}


def test_a_write_past_load_weights_stops_decoding_at_the_next_step(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    call(core, "pause", mode="in_place")
    parameter = next(p for n, p in model_of(core).named_parameters() if "norm" in n)
    with torch.no_grad():
        parameter.copy_(parameter * 2)
    add(core, "comes", prompt(3))
    streams = Streams(core).step(5)
    assert "comes" not in streams.tokens
    assert enforced(core)[Need.WRITE] >= 1
    call(core, "resume")
    streams.run()
    assert set(streams.stamps["comes"]) == {served(core)[0]}


def test_an_update_of_several_calls_without_a_mark_is_committed_under_the_pause(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    """AReaL's first call of each bucket is not known, so the pause takes force."""
    digest = publish(core, folders["new"], "new")["digest"]
    publish(core, folders["old"], "old")
    call(core, "pause", mode="in_place")
    areal(core, folders["new"], tensors_of(folders["new"]))
    assert served(core)[2] == digest
    assert call(core, "paused")["absorbed"] is False
    call(core, "resume")


def test_the_tokens_of_a_retracting_pause_are_those_of_their_versions(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    add(core, "r", prompt(1))
    streams = Streams(core).step(10)
    call(core, "pause", mode="retract", flush_cache=True)
    streams.step(5)
    num_old = len(streams.tokens["r"]) + len(core.batch_queue or ())
    assert num_old >= 14
    publish(core, folders["new"], "new")
    call(core, "resume")
    streams.run()
    num_new = 40 - num_old
    assert streams.stamps["r"] == ["old"] * num_old + ["new"] * num_new
    fresh = says_from(core, prompt(1) + streams.tokens["r"][:num_old], num_new)
    assert streams.tokens["r"][num_old:] == fresh


def says_from(core: EngineCore, text: list[int], count: int) -> list[int]:
    core.reset_prefix_cache()  # another split of the text rounds in another way
    add(core, "again", text, max_tokens=count)
    return Streams(core).run().tokens["again"]


def test_the_routes_tell_a_framework_that_it_is_paused(core: EngineCore) -> None:
    door = Door(core)
    reply = door.client.post("/pause?mode=keep&clear_cache=false").json()
    assert (reply["status"], reply["paused"], reply["absorbed"]) == (
        "paused",
        True,
        True,
    )
    state = door.get("/is_paused")
    assert (state["is_paused"], state["mode"], state["absorbed"]) == (
        True,
        "in_place",
        True,
    )
    assert "is absorbed" in door.get("/weight_update")["pause_detail"]
    assert len(says(core, "meanwhile")) == 40
    cleared = door.client.post("/pause?mode=keep").json()
    assert (cleared["mode"], cleared["absorbed"]) == ("retract", True)
    assert door.client.post("/resume").json()["paused"] is False
    assert door.get("/is_paused")["is_paused"] is False
