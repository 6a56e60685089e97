"""Upstream's calls that write into live weights begin a version without a digest."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.engine.core import EngineCore

from tests.e2e.test_sleep import refused, says
from tests.support.engines.bare_core import Streams, add, call, prompt, publish, stage
from tests.support.engines.mixtures import FILE, NORMS, part
from vllm.inflight.errors import Conflict, EngineFault, UpdateBusy
from vllm.inflight.worker.model import layerwise_reload

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def third(checkpoint: Any) -> Path:
    """Weights that come past any update."""
    return Path(checkpoint(2))


def reload(core: EngineCore, folder: Path) -> None:
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def replace(core: EngineCore, folder: str, patterns: tuple[str, ...]) -> Any:
    """Commit a subset, which is what the folder has."""
    manifest = {"format": 1, "subset": list(patterns)}
    call(core, "start", transport="local", manifest=manifest)
    call(core, "receive", update_info={"path": folder})
    call(core, "prepare")
    return call(core, "commit")


def parameters(core: EngineCore) -> dict[str, str]:
    (rank,) = call(core, "checksums")["ranks"]
    return dict(rank["checksums"])


def test_a_subset_after_a_reload_is_a_subset_of_what_was_reloaded(
    core: EngineCore, folders: dict[str, Path], third: Path, tmp_path: Path
) -> None:
    publish(core, third, "third")
    expected = parameters(core), says(core, "expected")
    publish(core, folders["new"], "new")
    replace(core, part(folders["old"], NORMS, tmp_path / "old"), NORMS)
    before = call(core, "info")
    reload(core, third)
    after = call(core, "info")
    assert (after["epoch"], after["weights"]) == (before["epoch"] + 1, "live")
    assert after["weight_version"] == f"untracked-{after['epoch']}"
    assert (after["digest"], after["previous"]) == (None, None)
    assert refused(core, "rollback") == "nothing_to_roll_back"
    assert call(core, "source")["path"] is None
    patterns = ("model.norm.weight",)
    reply = replace(core, part(third, patterns, tmp_path / "third"), patterns)
    assert (reply["digest"], reply["drift"]) == (None, None)
    assert (parameters(core), says(core, "mixture")) == expected
    call(core, "rollback")
    assert (parameters(core), says(core, "back")) == expected


def test_a_reload_reads_no_kv_of_the_weights_before(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    publish(core, folders["old"], "again")
    assert says(core, "before") != expected
    reload(core, folders["new"])
    assert says(core, "after") == expected


def test_requests_run_on_across_a_reload_and_their_tokens_say_so(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    add(core, "runs", prompt(3))
    streams = Streams(core).step(8)
    reload(core, folders["new"])
    label = call(core, "info")["weight_version"]
    streams.run()
    assert len(streams.tokens["runs"]) == 40
    stamps = streams.stamps["runs"]
    assert label != "old" and stamps == sorted(stamps)
    assert set(stamps) == {"old", label}


def test_a_weight_reset_begins_a_version_without_a_digest(core: EngineCore) -> None:
    before = call(core, "info")
    core.collective_rpc("reset_weights")
    after = call(core, "info")
    assert (after["epoch"], after["digest"]) == (before["epoch"] + 1, None)
    assert refused(core, "rollback") == "nothing_to_roll_back"


@pytest.mark.parametrize("method", ["reload_weights", "reset_weights"])
def test_a_reload_or_reset_is_rejected_during_an_update(
    core: EngineCore, folders: dict[str, Path], method: str
) -> None:
    before = parameters(core)
    stage(core, folders["new"])
    with pytest.raises(UpdateBusy, match=f"{method}.*update_weights_from_disk"):
        core.collective_rpc(method)
    assert parameters(core) == before
    assert call(core, "commit", weight_version="new")["weight_version"] == "new"


def test_a_reload_is_rejected_if_a_connector_could_return_old_kv(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise Conflict("a connector of a test")

    monkeypatch.setattr(
        "vllm.inflight.engine.scheduling.kv_connectors.check_connectors", refuse
    )
    with pytest.raises(Conflict, match="a connector of a test"):
        reload(core, folders["new"])


def test_a_reload_that_begins_with_nothing_changes_nothing(
    core: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    publish(core, folders["new"], "new")
    expected, told = says(core, "expected"), call(core, "info")
    with pytest.raises(Exception, match="nowhere"):
        reload(core, tmp_path / "nowhere")
    assert call(core, "info") == told
    assert says(core, "after") == expected
    assert call(core, "rollback")["weight_version"] == "old"


UNKNOWN = {
    "weights_iterator": [("model.unknown.weight", torch.zeros(1))],
    "is_checkpoint_format": False,
}


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("reload_weights", (), {"weight_path": "of a mistyped argument"}),
        ("reload_weights", (), {"weights_iterator": "no pairs"}),
        ("reload_weights", (), UNKNOWN),
        ("reset_weights", ("something",), {}),
    ],
)
def test_a_call_that_is_rejected_before_it_writes_changes_nothing(
    core: EngineCore, folders: dict[str, Path], method: str, args: Any, kwargs: Any
) -> None:
    reload(core, folders["old"])  # one that succeeds leaves nothing behind
    publish(core, folders["old"], "old")
    publish(core, folders["new"], "new")
    expected, told = says(core, "expected"), call(core, "info")
    add(core, "runs", prompt(3))
    streams = Streams(core).step(8)
    with pytest.raises(Exception, match=r"argument|unpack|unknown") as raised:
        core.collective_rpc(method, args=args, kwargs=kwargs)
    assert not isinstance(raised.value, EngineFault)
    assert call(core, "info") == told
    assert streams.run().tokens["runs"] == expected
    assert call(core, "rollback")["weight_version"] == "old"


def test_a_loader_that_reloads_nothing_changes_nothing(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(core, folders["new"], "new")
    expected, told = says(core, "expected"), call(core, "info")
    monkeypatch.setattr(core.vllm_config.load_config, "load_format", "dummy")
    with pytest.raises(NotImplementedError, match="dummy"):
        reload(core, folders["old"])
    assert call(core, "info") == told
    assert says(core, "after") == expected


@pytest.mark.parametrize(
    "step", ["restore_layer_on_meta", "_wrap_parameters_weight_loader"]
)
def test_a_reload_that_fails_while_detaching_layers_changes_nothing(
    core: EngineCore,
    folders: dict[str, Path],
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As upstream's does at a loader that has no name, in some later layer."""
    publish(core, folders["new"], "new")
    expected, told = says(core, "expected"), call(core, "info")
    whole, calls = getattr(layerwise, step), count()

    def break_off(layer: Any, *args: Any) -> None:
        whole(layer, *args)
        if layer._parameters and next(calls) == 3:
            raise AttributeError("of a test")

    monkeypatch.setattr(layerwise, step, break_off)
    with pytest.raises(AttributeError, match="of a test"):
        reload(core, folders["old"])
    monkeypatch.undo()
    assert call(core, "info") == told
    assert says(core, "after") == expected
    reload(core, folders["new"])
    assert says(core, "again") == expected


def test_a_reload_that_fails_in_its_first_write_leaves_the_weights_gone(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = layerwise._copy_and_restore_kernel_tensors

    def break_off(*args: Any) -> None:
        whole(*args)
        raise RuntimeError("of a test")

    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", break_off)
    with pytest.raises(EngineFault, match=r"half written.*of a test"):
        reload(core, folders["new"])
    monkeypatch.undo()
    assert call(core, "info")["weights"] == "gone"
    publish(core, folders["old"], "again")


def test_a_folder_that_is_not_there_is_not_where_the_next_reload_looks(
    core: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")
    reload(core, folders["new"])
    with pytest.raises(Exception, match="nowhere"):
        reload(core, tmp_path / "nowhere")
    core.collective_rpc("reload_weights")
    assert says(core, "after") == expected
    reload(core, folders["old"])


def test_a_reload_in_kernel_format_that_fails_leaves_the_weights_gone(
    core: EngineCore, folders: dict[str, Path]
) -> None:
    told = call(core, "info")
    some = [("model.norm.weight", torch.zeros(1)), *UNKNOWN["weights_iterator"]]
    with pytest.raises(EngineFault, match=r"reload_weights has.*all tensors"):
        core.collective_rpc(
            "reload_weights", kwargs=UNKNOWN | {"weights_iterator": some}
        )
    after = call(core, "info")
    assert (after["weights"], after["epoch"]) == ("gone", told["epoch"] + 1)
    publish(core, folders["old"], "again")


def test_a_reload_that_fails_leaves_weights_that_are_not_decoded_with(
    core: EngineCore, folders: dict[str, Path], tmp_path: Path
) -> None:
    publish(core, folders["new"], "new")
    expected, told = says(core, "expected"), call(core, "info")
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = load_file(folders["old"] / FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, broken / FILE)
    with pytest.raises(EngineFault, match=r"reload_weights has.*all tensors"):
        reload(core, broken)
    after = call(core, "info")
    facts = after["weights"], after["digest"], after["previous"]
    assert facts == ("gone", None, None)
    assert after["weight_version"] != told["weight_version"]
    add(core, "waits", prompt(3))
    assert Streams(core).step(3).tokens == {}
    assert refused(core, "resume") == "engine_asleep"
    publish(core, folders["new"], "again")
    assert Streams(core).run().tokens["waits"] == expected


def test_a_reload_whose_layers_cannot_be_put_back_holds_decoding(
    core: EngineCore, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(core, folders["new"], "new")
    expected = says(core, "expected")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("of a test")

    monkeypatch.setattr(layerwise_reload, "leave", fail)
    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", fail)
    add(core, "waits", prompt(3))
    streams = Streams(core).step(2)
    before = list(streams.tokens["waits"])
    with pytest.raises(EngineFault, match=r"reload_weights has.*update of all tensors"):
        reload(core, folders["old"])
    told = call(core, "info")
    assert (told["weights"], told["digest"], told["previous"]) == ("gone", None, None)
    assert told["weight_version"] != "new"
    assert "restoring the layers failed" in told["weights_detail"]
    assert streams.step(3).tokens["waits"] == before
    monkeypatch.undo()
    publish(core, folders["new"], "again")
    assert len(streams.run().tokens["waits"]) == 40
    assert says(core, "after") == expected
