"""Files that somebody has made to do harm: refused, and nothing changes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.broken_files import BROKEN
from tests.support.engines.probe import greedy
from vllm.inflight.errors import Forbidden, InflightError, Malformed, WeightsMismatch

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, old: Path, new: Path) -> Path:
    """The folder from which updates may read: both versions, and a link."""
    root = tmp_path_factory.mktemp("allowed")
    model = root / "model"
    shutil.copytree(new, model)
    (root / "within").symlink_to(model)
    shutil.copytree(old, root / "before")
    return root


@pytest.fixture(scope="module")
def fenced(start: Callable[..., Any], old: Path, fresh: Any, root: Path) -> Any:
    extra = {"inflight": {"allowed_paths": f"/nowhere:{root}"}}
    transport = WeightTransferConfig(backend="local")
    return start(old, additional_config=extra, weight_transfer_config=transport)


@pytest.fixture
def before(fenced: Any) -> Any:
    """What it says before; the test must leave that so."""
    said = greedy(fenced)
    yield said
    assert greedy(fenced) == said
    assert fenced.weight_update_status()["active"] is None


def test_files_that_lie_about_themselves_are_malformed(
    fenced: Any, root: Path, before: Any
) -> None:
    for data in BROKEN.values():
        (root / "broken.safetensors").write_bytes(data)
        with pytest.raises(Malformed):
            fenced.update_weights_from_disk(str(root / "broken.safetensors"), "bad")


@pytest.mark.parametrize(
    "names",
    [
        [f"model.layers.{i}.mlp.up_proj.wieght" for i in range(20_000)],
        ["x" * 100_000, "\u0000\u2028" * 30_000],
        ["model.norm.weight/../../etc/passwd", "\n\n[INFO] weights are live"],
    ],
    ids=["20,000 unknown ones", "long ones", "odd ones"],
)
def test_a_file_with_hostile_tensor_names_is_rejected_at_once(
    fenced: Any, root: Path, before: Any, names: list[str]
) -> None:
    save_file({name: torch.zeros(1) for name in names}, root / "names.safetensors")
    with pytest.raises(WeightsMismatch) as caught:
        path = str(root / "names.safetensors")
        fenced.update_weights_from_disk(path, "bad", deadline_s=60)
    assert len(json.dumps(caught.value.to_dict())) < 100_000


def test_a_tensor_of_a_dtype_that_no_model_has_is_rejected_by_name(
    fenced: Any, root: Path, before: Any
) -> None:
    path = root / "complex.safetensors"
    save_file({"odd": torch.zeros(4, dtype=torch.complex64)}, path)
    with pytest.raises(WeightsMismatch, match="odd: it is complex64") as caught:
        fenced.update_weights_from_disk(str(path), "bad")
    assert "odd" in caught.value.tensors


# Paths


def test_files_in_an_allowed_folder_are_read(
    fenced: Any, root: Path, before: Any, fresh: Any
) -> None:
    for path in ("model", "within", "within/../model", "./model/"):
        fenced.update_weights_from_disk(f"{root}/{path}", "new")
    assert greedy(fenced) == fresh
    fenced.update_weights_from_disk(str(root / "before"), "old")


def escapes(root: Path, outside: Path) -> dict[str, str]:
    """Names of one file or folder outside, as they might be smuggled in."""
    (root / "link").symlink_to(outside)
    (root / "file.safetensors").symlink_to(outside / "model.safetensors")
    shards = root / "shards"
    shards.mkdir()
    (shards / "model.safetensors").symlink_to(outside / "model.safetensors")
    config = root / "config"
    config.mkdir()
    (config / "config.json").symlink_to(outside / "config.json")
    (config / "model.safetensors").write_bytes(b"")
    index = root / "index"
    index.mkdir()
    (index / "model.safetensors.index.json").symlink_to("/etc/passwd")
    return {
        "it": str(outside),
        "by dots": f"{root}/../{outside.name}/..",
        "by a link": str(root / "link"),
        "by a link and dots": f"{root}/link/../{outside.name}",
        "a linked file": str(root / "file.safetensors"),
        "linked shards": str(shards),
        "a linked configuration": str(config),
        "a linked index": str(index),
        "a device": "/dev/zero",
        "of a process": "/proc/self/environ",
        "nothing there": "/nobody/knows",
        "a neighbour by its name": f"{root}-neighbour",
    }


def test_no_path_leads_out_of_the_allowed_folders(
    fenced: Any, root: Path, old: Path, before: Any
) -> None:
    for how, path in escapes(root, old).items():
        with pytest.raises(Forbidden) as caught:
            fenced.update_weights_from_disk(path, "bad")
        assert "allowed-paths" in str(caught.value), how
        # Nor where a link leads, nor whether there is anything.
        assert str(old) in path or str(old) not in str(caught.value), how


def test_an_index_that_names_files_elsewhere_is_malformed(
    fenced: Any, root: Path, before: Any
) -> None:
    folder = root / "listed"
    folder.mkdir()
    for shard in ("../old.safetensors", "/etc/passwd", "..", "", 7, None, ["a"], {}):
        index = {"weight_map": {"model.norm.weight": shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(Malformed):
            fenced.update_weights_from_disk(str(folder), "bad")


def test_values_that_are_no_path_are_rejected(fenced: Any, before: Any) -> None:
    for path in ("\0", "a" * 5000, "~", "file:///etc/passwd"):
        with pytest.raises(InflightError) as caught:
            fenced.update_weights_from_disk(path, "bad")
        assert caught.value.status in (400, 403)


def test_a_name_in_shared_memory_cannot_lead_to_another_file(
    fenced: Any, root: Path, before: Any
) -> None:
    link = Path("/dev/shm") / f"vllm-inflight-test-{root.name}"
    link.symlink_to(root / "model" / "model.safetensors")
    try:
        for name in (link.name, "../etc/passwd", "..", ".hidden", "", 7):
            update_id = fenced.start_weight_update()["update_id"]
            with pytest.raises((Forbidden, Malformed)):
                fenced.update_weights({"update_info": {"shm": name}}, update_id)
    finally:
        link.unlink()
