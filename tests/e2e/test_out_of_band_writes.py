"""Out-of-band writes: a user's own calls write into live weights.

The engine core of these tests keeps its weights where they are, as a GPU does: the
packing of vLLM's CPU build is off, so that a loader can write into a live parameter.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from tests.e2e.test_sleep import refused, says
from tests.e2e.test_upstream_reloads import parameters, replace
from tests.support.engines.bare_core import Streams, add, call, prompt, publish, stage
from tests.support.engines.mixtures import NORMS, part
from tests.support.engines.script import OPTIONS
from tests.support.engines.unpacked import unpacked
from tests.support.engines.user_extension import Extension, tensors_of
from tests.support.waiting import until
from vllm.inflight.errors import UpdateBusy, WrongPhase
from vllm.inflight.worker.model import layerwise_reload

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.engines.user_extension.Extension"


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path]) -> Iterator[EngineCore]:
    """An engine core with a worker extension, whose weights are not packed."""
    options = OPTIONS | {"max_num_seqs": 4, "dtype": "float32"}
    with unpacked():
        config = EngineArgs(
            str(folders["old"]), worker_extension_cls=EXTENSION, **options
        ).create_engine_config()
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
        yield core
        core.shutdown()


@pytest.fixture
def writable(core: EngineCore) -> Iterator[EngineCore]:
    """The core on the old weights; it may sleep, and is whole in the end."""
    core.vllm_config.model_config.enable_sleep_mode = True
    yield core
    if core.model_executor.is_sleeping:
        core.wake_up()
    if call(core, "info")["weights"] == "loading":
        call(core, "abort")
    core.vllm_config.model_config.enable_sleep_mode = False


@pytest.fixture(scope="module")
def third(checkpoint: Any) -> Path:
    """Weights that come past any update."""
    return Path(checkpoint(2))


@pytest.fixture
def wanted(writable: EngineCore, third: Path) -> tuple[dict[str, str], list[int]]:
    """What an engine serves and says with the third weights; it has them no more."""
    publish(writable, third, "third")
    found = parameters(writable), says(writable, "wanted")
    publish(writable, third.parent / third.name, "third again")
    return found


def model_of(core: EngineCore) -> Any:
    return core.model_executor.driver_worker.worker.model_runner.get_model()


def says_at_last(core: EngineCore, name: str) -> list[int]:
    """What it says if its next step finds that it may decode again."""
    add(core, name, prompt(3))
    return Streams(core).step(1).run().tokens[name]


def rpc(core: EngineCore, method: Any, *args: Any) -> Any:
    return core.collective_rpc(method, args=args)


def elsewhere(act: Callable[[], Any]) -> Any:
    """What `act` returns or raises in a thread that takes no steps."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def one_by_one(core: EngineCore, folder: Path) -> None:
    for name, tensor in tensors_of(str(folder)).items():
        rpc(core, "tests_load_one", name, tensor)


def by_hand(core: EngineCore, folder: Path) -> None:
    for name, tensor in tensors_of(str(folder)).items():
        model_of(core).load_weights([(name, tensor)])


def by_hand_through_data(core: EngineCore, folder: Path) -> None:
    Extension.tests_copy(core.model_executor.driver_worker.worker, str(folder), "data")


WAYS: dict[str, Callable[[EngineCore, Path], Any]] = {
    "load_weights": lambda core, f: rpc(core, "tests_load", str(f)),
    "a call per tensor": one_by_one,
    "layer by layer": lambda core, f: rpc(core, "tests_reload", str(f)),
    "copy_": lambda core, f: rpc(core, "tests_copy", str(f), "copy_"),
    "data.copy_": lambda core, f: rpc(core, "tests_copy", str(f), "data"),
    "a part's data": lambda core, f: rpc(core, "tests_copy", str(f), "weight_loader"),
    "data =": lambda core, f: rpc(core, "tests_copy", str(f), "data ="),
    "a function": lambda core, f: rpc(core, lambda w: w.tests_load(str(f))),
    "apply_model": lambda core, f: rpc(
        core,
        "apply_model",
        lambda model: model.load_weights(tensors_of(str(f)).items()),
    ),
    "directly": by_hand,
    "directly, through data": by_hand_through_data,
}
DIRECT = [way for way in WAYS if "directly" in way]


@pytest.mark.parametrize("way", WAYS)
def test_an_out_of_band_write_begins_a_version(
    writable: EngineCore, folders: dict[str, Path], wanted: Any, way: str, third: Path
) -> None:
    core, folder = writable, third
    publish(core, folders["old"], "old")
    publish(core, folders["new"], "new")
    before = call(core, "info")
    assert says(core, "before") != wanted[1]
    WAYS[way](core, folder)
    # The same prompt: what it finds in the prefix cache is of the weights before.
    assert says(core, "after") == wanted[1]
    after = call(core, "info")
    assert after["epoch"] > before["epoch"]
    assert after["weight_version"] == f"untracked-{after['epoch']}"
    assert (after["digest"], after["previous"]) == (None, None)
    assert (after["weights"], after["weights_detail"]) == ("live", None)
    assert call(core, "source")["path"] is None
    assert parameters(core) == wanted[0]
    assert refused(core, "rollback") == "nothing_to_roll_back"


@pytest.mark.parametrize("way", WAYS)
def test_no_rollback_crosses_a_call_that_wrote_weights(
    writable: EngineCore, folders: dict[str, Path], way: str, third: Path
) -> None:
    """A rollback and another one would serve what was written under the old label."""
    publish(writable, folders["new"], "new")
    WAYS[way](writable, third)
    assert refused(writable, "rollback") == "nothing_to_roll_back"


@pytest.mark.parametrize("way", WAYS)
def test_a_subset_after_a_write_is_a_subset_of_what_was_written(
    writable: EngineCore,
    folders: dict[str, Path],
    wanted: Any,
    third: Path,
    way: str,
    tmp_path: Path,
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    replace(core, part(folders["old"], NORMS, tmp_path / "old"), NORMS)
    WAYS[way](core, third)
    patterns = ("model.norm.weight",)
    reply = replace(core, part(third, patterns, tmp_path / "third"), patterns)
    assert (reply["digest"], reply["drift"]) == (None, None)
    assert parameters(core) == wanted[0]
    call(core, "rollback")
    assert parameters(core) == wanted[0]


def test_a_call_that_writes_nothing_changes_nothing(
    writable: EngineCore, folders: dict[str, Path]
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    told, said = call(core, "info"), says(core, "before")
    assert rpc(core, "tests_double", 21) == [42]
    assert rpc(core, lambda worker: worker.rank) == [0]
    (count,) = rpc(core, "apply_model", lambda m: sum(1 for _ in m.parameters()))
    assert count > 10
    with pytest.raises(ZeroDivisionError):
        rpc(core, lambda worker: 1 // 0)
    with pytest.raises(NotImplementedError, match="tests_missing"):
        rpc(core, "tests_missing")
    assert call(core, "info") == told and says(core, "after") == said
    assert call(core, "rollback")["weight_version"] == "old"


def test_adapter_activations_during_an_update_do_not_count_as_writes(
    writable: EngineCore, folders: dict[str, Path]
) -> None:
    """Steps, commits and rollbacks change nothing that a call would be blamed for."""
    core = writable
    for label in ("new", "old", "new"):
        publish(core, folders[label], label)
        says(core, f"says {label}")
        rpc(core, "tests_double", 1)
        assert call(core, "info")["weight_version"] == label
    call(core, "rollback")
    rpc(core, "tests_double", 1)
    assert call(core, "info")["weight_version"] == "old"


def computed(core: EngineCore, streams: Streams) -> int:
    """Tokens of the one request that runs, with those of steps on their way."""
    return len(streams.tokens["runs"]) + len(core.batch_queue or ())


@pytest.mark.parametrize("way", ["load_weights", "data.copy_", "directly"])
def test_requests_run_on_across_a_write_and_their_tokens_say_so(
    writable: EngineCore, third: Path, way: str
) -> None:
    core = writable
    add(core, "runs", prompt(3))
    streams = Streams(core).step(8)
    num_before = computed(core, streams)
    WAYS[way](core, third)
    streams.run()
    label = call(core, "info")["weight_version"]
    stamps = streams.stamps["runs"]
    assert stamps == ["old"] * num_before + [label] * (40 - num_before)


def test_a_write_ends_the_update_that_was_to_follow_on_what_was_served(
    writable: EngineCore, folders: dict[str, Path], third: Path
) -> None:
    core = writable
    stage(core, folders["new"])
    update_id = call(core, "status")["active"]["update_id"]
    rpc(core, "tests_load", str(third))
    told = call(core, "status", update_id=update_id)
    assert (told["phase"], told["error"]["code"]) == ("aborted", "update_in_progress")
    assert "tests_load has written" in told["error"]["message"]
    assert refused(core, "commit", update_id=update_id) == "update_in_progress"
    publish(core, folders["new"], "new")


def test_a_call_that_writes_nothing_leaves_an_update_under_way_alone(
    writable: EngineCore, folders: dict[str, Path]
) -> None:
    stage(writable, folders["new"])
    rpc(writable, "tests_double", 1)
    assert call(writable, "commit", weight_version="new")["weight_version"] == "new"


# ------------------------------------------------------ after a sleep of level 2


def test_direct_loads_after_a_sleep_of_level_2_end_the_wait(
    writable: EngineCore, wanted: Any, third: Path
) -> None:
    """As a trainer in the engine's own process does, past any call of the workers."""
    core = writable
    core.sleep(2)
    core.wake_up(["weights"])
    by_hand(core, third)
    core.wake_up(["kv_cache"])
    assert says_at_last(core, "after") == wanted[1]
    told = call(core, "info")
    assert (told["weights"], told["digest"], told["previous"]) == ("live", None, None)


@pytest.mark.parametrize(
    "way", ["a call per tensor", "copy_", "data.copy_", "layer by layer", "directly"]
)
def test_out_of_band_writes_after_a_sleep_end_the_wait_when_complete(
    writable: EngineCore, wanted: Any, third: Path, way: str
) -> None:
    core = writable
    core.sleep(2)
    core.wake_up()
    assert rpc(core, "tests_double", 1) == [2]
    assert call(core, "info")["weights"] == "gone"
    WAYS[way](core, third)
    assert says_at_last(core, "after") == wanted[1]
    assert call(core, "info")["weights"] == "live"


@pytest.mark.parametrize("is_direct", [False, True])
def test_the_first_of_many_tensors_does_not_end_the_wait(
    writable: EngineCore, wanted: Any, third: Path, is_direct: bool
) -> None:
    core, pairs = writable, list(tensors_of(str(third)).items())
    fused = next(i for i, (n, _) in enumerate(pairs) if n.endswith("k_proj.weight"))
    pairs.append(pairs.pop(fused))  # the last is a third of a fused parameter

    def load(name: str, tensor: torch.Tensor) -> None:
        if is_direct:
            model_of(core).load_weights([(name, tensor)])
        else:
            rpc(core, "tests_load_one", name, tensor)

    core.sleep(2)
    core.wake_up()
    epoch = call(core, "info")["epoch"]
    add(core, "waits", prompt(3))
    for name, tensor in pairs[:-1]:
        load(name, tensor)
        assert Streams(core).step(1).tokens == {}
    told = call(core, "info")
    assert (told["weights"], told["epoch"]) == ("gone", epoch)
    layer = pairs[-1][0].replace("k_proj", "qkv_proj")
    detail = told["weights_detail"]
    assert "18 of 19 parameters have been written since" in detail and layer in detail
    answer = core.inflight("resume", {})["error"]
    assert answer["code"] == "engine_asleep" and layer in answer["message"]
    assert refused(core, "checksums") == "engine_asleep"
    load(*pairs[-1])
    assert Streams(core).step(1).run().tokens["waits"] == wanted[1]
    told = call(core, "info")
    assert (told["weights"], told["epoch"]) == ("live", epoch + 1)


def test_a_published_version_ends_the_wait_after_a_part_was_loaded(
    writable: EngineCore, folders: dict[str, Path], third: Path
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    core.sleep(2)
    core.wake_up()
    rpc(core, "tests_load", str(third), ["model.norm.weight"])
    publish(core, folders["new"], "again")
    assert says(core, "after") == expected
    told = call(core, "info")
    assert (told["weights"], told["weight_version"]) == ("live", "again")


def test_a_reload_of_a_part_does_not_end_the_wait(
    writable: EngineCore, folders: dict[str, Path], third: Path
) -> None:
    core = writable
    core.sleep(2)
    core.wake_up()
    some = tensors_of(str(third), ["model.norm.weight"])
    core.collective_rpc("reload_weights", kwargs={"weights_iterator": some.items()})
    assert call(core, "info")["weights"] == "gone"
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(third)})
    assert call(core, "info")["weights"] == "live"


# ------------------------------------------------------------ calls that fail


def told_of_weights(core: EngineCore) -> dict[str, Any]:
    """What the engine says of its weights; scrubs, of which it tells too, go on."""
    return {**call(core, "info"), "scrub": None}


@pytest.mark.parametrize(
    ("method", "args"),
    [("tests_start_and_fail", ()), ("tests_reload_and_fail", ("new", 0))],
)
def test_a_call_that_breaks_off_before_it_writes_changes_nothing(
    writable: EngineCore, folders: dict[str, Path], method: str, args: Any
) -> None:
    """It has taken all layers aside; the next step would have ended the engine."""
    core = writable
    publish(core, folders["new"], "new")
    told = told_of_weights(core)
    expected = says(core, "expected")
    paths = tuple(str(folders.get(arg, arg)) if arg == "new" else arg for arg in args)
    add(core, "runs", prompt(3))
    streams = Streams(core).step(8)
    with pytest.raises((TypeError, RuntimeError), match="of the extension"):
        rpc(core, method, *paths)
    assert told_of_weights(core) == told
    assert streams.run().tokens["runs"] == expected
    assert call(core, "rollback")["weight_version"] == "old"


@pytest.mark.parametrize("method", ["tests_reload_and_fail", "tests_load_and_fail"])
@pytest.mark.parametrize("is_healed_by", ["an update", "its own second try"])
def test_a_call_that_fails_during_its_write_leaves_no_weights_to_decode_with(
    writable: EngineCore,
    folders: dict[str, Path],
    wanted: Any,
    third: Path,
    method: str,
    is_healed_by: str,
) -> None:
    core = writable
    publish(core, folders["old"], "old")
    told = call(core, "info")
    with pytest.raises(RuntimeError, match="of the extension"):
        rpc(core, method, str(third), 20)
    after = call(core, "info")
    facts = after["weights"], after["digest"], after["previous"]
    assert facts == ("gone", None, None)
    assert after["weight_version"] != told["weight_version"]
    assert method in after["weights_detail"]
    assert "half written" in after["weights_detail"]
    add(core, "waits", prompt(3))
    assert Streams(core).step(3).tokens == {}
    if is_healed_by == "an update":
        publish(core, third, "again")
    else:
        rpc(core, "tests_load", str(third))
    assert Streams(core).run().tokens["waits"] == wanted[1]
    assert parameters(core) == wanted[0]
    assert call(core, "info")["weights"] == "live"


def test_decoding_waits_while_layers_cannot_be_restored_after_a_failed_reload(
    writable: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    expected = says(core, "expected")

    def fail(model: Any) -> None:
        raise RuntimeError("not put back")

    monkeypatch.setattr(layerwise_reload, "leave", fail)
    with pytest.raises(TypeError, match="of the extension"):
        rpc(core, "tests_start_and_fail")
    told = call(core, "info")
    assert (told["weights"], told["digest"], told["previous"]) == ("gone", None, None)
    assert told["weight_version"] != "new"
    assert "not put back" in told["weights_detail"]
    add(core, "waits", prompt(3))
    assert Streams(core).step(3).tokens == {}
    assert refused(core, "start", transport="local") == "engine_fault"
    monkeypatch.undo()
    core.vllm_config.model_config.enable_sleep_mode = True
    publish(core, folders["new"], "again")
    assert Streams(core).run().tokens["waits"] == expected


# --------------------------------------------------- a reload in several calls


def test_a_reload_in_several_calls_holds_decoding_until_it_has_ended(
    writable: EngineCore, wanted: Any, third: Path, folders: dict[str, Path]
) -> None:
    core = writable
    publish(core, folders["old"], "old")
    add(core, "runs", prompt(3))
    streams = Streams(core).step(8)
    num_before = computed(core, streams)
    elsewhere(lambda: rpc(core, "tests_start_load"))
    told = call(core, "info")
    assert (told["weights"], told["weight_version"]) == ("loading", "old")
    assert "tests_start_load" in told["weights_detail"]
    assert "abort_weight_update" in told["weights_detail"]
    names = list(tensors_of(str(third)))
    for some in (names[:9], names[9:]):
        add(core, f"comes {len(some)}", prompt(5), max_tokens=2)
        assert streams.step(3).tokens == {"runs": streams.tokens["runs"]}
        assert len(streams.tokens["runs"]) == num_before
        elsewhere(lambda some=some: rpc(core, "tests_load", str(third), some))
    assert len(streams.tokens["runs"]) == num_before
    elsewhere(lambda: rpc(core, "tests_finish_load"))
    assert call(core, "info")["weights"] == "live"
    streams.run()
    label = call(core, "info")["weight_version"]
    stamps = ["old"] * num_before + [label] * (40 - num_before)
    assert streams.stamps["runs"] == stamps
    assert says(core, "after") == wanted[1] and parameters(core) == wanted[0]


FILLING = {
    "start": {"transport": "local"},
    "receive": {"update_info": {}},
    "prepare": {},
    "commit": {},
    "rollback": {},
    "checksums": {},
    "resume": {},
}


def test_calls_that_need_all_weights_are_rejected_during_an_open_reload(
    writable: EngineCore, folders: dict[str, Path]
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    elsewhere(lambda: rpc(core, "tests_start_load"))
    for method, body in FILLING.items():
        error = core.inflight(method, body)["error"]
        assert error["code"] == "update_in_progress", method
        assert "tests_start_load" in error["message"]
    for phase in ("start_weight_update", "finish_weight_update"):
        with pytest.raises(UpdateBusy, match="tests_start_load"):
            rpc(core, phase)
    with pytest.raises(UpdateBusy, match="abort_weight_update"):
        rpc(core, "update_weights", {"path": "somewhere"})
    assert call(core, "abort")["phase"] == "aborted"
    told = call(core, "info")
    assert (told["weights"], told["weight_version"]) == ("live", "new")
    assert call(core, "rollback")["weight_version"] == "old"


@pytest.mark.parametrize("has_written", [False, True])
def test_an_unfinished_reload_is_ended_at_its_deadline(
    writable: EngineCore,
    folders: dict[str, Path],
    third: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_written: bool,
) -> None:
    core = writable
    expected, told = says(core, "expected"), call(core, "info")
    deadline = core.vllm_inflight.outside_writes, "_deadline_s", 0.2
    if not has_written:
        monkeypatch.setattr(*deadline)
    elsewhere(lambda: rpc(core, "tests_start_load"))
    if has_written:
        names = list(tensors_of(str(third)))[:9]
        monkeypatch.setattr(*deadline)
        elsewhere(lambda: rpc(core, "tests_load", str(third), names))
    add(core, "waits", prompt(3))
    streams = Streams(core)

    def is_over() -> bool:
        core.vllm_inflight.step_queue.run(lambda: streams.step(1))
        return call(core, "info")["weights"] != "loading"

    until(is_over)
    if has_written:
        after = call(core, "info")
        assert (after["weights"], after["previous"]) == ("gone", None)
        assert "its deadline has passed" in after["weights_detail"]
        publish(core, folders["old"], "old")
    else:
        assert told_of_weights(core) == told
    assert streams.run().tokens["waits"] == expected


def test_an_engine_that_is_put_to_sleep_ends_a_reload_that_is_under_way(
    writable: EngineCore,
) -> None:
    core = writable
    expected = says(core, "expected")
    elsewhere(lambda: rpc(core, "tests_start_load"))
    core.sleep(1)
    core.wake_up()
    assert call(core, "info")["weights"] == "live"
    assert says(core, "after") == expected


def test_an_unfinished_reload_begun_by_the_stepping_thread_is_ended_by_the_next_step(
    writable: EngineCore,
) -> None:
    """Nobody else would end it: whoever began it waits for tokens now."""
    core = writable
    expected, told = says(core, "expected"), call(core, "info")
    for begin in (
        lambda: rpc(core, "tests_start_load"),
        lambda: Extension.tests_start_load(core.model_executor.driver_worker.worker),
    ):
        begin()
        assert says_at_last(core, "after") == expected
        assert call(core, "info") == told


def test_a_step_in_the_middle_of_a_reload_does_not_end_the_engine(
    writable: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that step together take steps without requests, which nothing holds."""
    core = writable
    expected = says(core, "expected")
    monkeypatch.setattr(
        core.vllm_inflight.outside_writes, "before_call", lambda **_: None
    )
    Extension.tests_start_load(core.model_executor.driver_worker.worker)
    core.execute_dummy_batch()
    assert says(core, "after") == expected


# -------------------------------------------------------- upstream's own phases


@pytest.mark.parametrize("method", ["tests_update"])
def test_a_single_phase_of_an_update_called_by_an_extension_is_rejected(
    writable: EngineCore, folders: dict[str, Path], method: str
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    told = call(core, "info")
    with pytest.raises(WrongPhase, match=r"collective_rpc\('update_weights'\)"):
        rpc(core, method, {})
    assert call(core, "info") == told
    assert call(core, "rollback")["weight_version"] == "old"


def test_only_an_update_loads_into_the_shadow_weights(
    writable: EngineCore, folders: dict[str, Path]
) -> None:
    core = writable
    publish(core, folders["new"], "new")
    worker = core.model_executor.driver_worker.worker
    second = worker.vllm_inflight.stager.shadow.module
    for _ in range(2):  # an update has stood in this place meanwhile
        with pytest.raises(WrongPhase, match=r"model_runner\.model"):
            second.load_weights(tensors_of(str(folders["old"])).items())
        publish(core, folders["old"], "old")
    assert call(core, "rollback")["weight_version"] == "old"


# ------------------------------------------------------------------- over HTTP


def test_routes_say_why_nothing_is_decoded(
    writable: EngineCore, folders: dict[str, Path]
) -> None:
    from tests.support.engines.core_door import Door

    door = Door(writable)
    elsewhere(lambda: rpc(writable, "tests_start_load"))
    status, message = door.refused("/update_weights", update_info={})
    assert status == 409 and "tests_start_load" in message
    assert door.get("/is_paused")["weights_detail"] == message
    assert door.post("/abort_weight_update")["phase"] == "aborted"
    assert door.get("/weight_info")["weights"] == "live"
