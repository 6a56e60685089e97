"""The tensors of the checkpoint that an engine started from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm.inflight.ops import gpu_digest
from vllm.inflight.worker.model import support
from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.shadow import parameters
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint


def origin(
    model: str,
    draft: str | None = None,
    load_format: str = "auto",
    hf_overrides: Any = None,
    method: str = "eagle3",
) -> StartCheckpoint:
    def config(path: str) -> SimpleNamespace:
        return SimpleNamespace(model=path, revision=None, hf_overrides=hf_overrides)

    drafting = draft and SimpleNamespace(
        draft_model_config=config(draft), method=method
    )
    return StartCheckpoint.of(
        SimpleNamespace(
            load_config=SimpleNamespace(download_dir=None, load_format=load_format),
            model_config=config(model),
            speculative_config=drafting,
        )
    )


def written(folder: Path, **files: str) -> str:
    folder.mkdir()
    for file, name in files.items():
        save_file({name: torch.zeros(1)}, folder / f"{file}.safetensors")
    return str(folder)


def test_all_checkpoint_files_are_read_and_a_drafters_names_get_a_prefix(
    tmp_path: Path,
):
    model = written(tmp_path / "model", one="a.weight", two="b.weight")
    draft = written(tmp_path / "draft", one="c.weight")
    found = origin(model, draft)
    assert all(name in found for name in ("a.weight", "b.weight", "draft.c.weight"))
    assert all(name not in found for name in ("c.weight", "draft.a.weight", "a"))


def test_tensors_of_mtp_layers_have_no_second_names(tmp_path: Path):
    model = written(tmp_path / "model", one="a.weight")
    assert origin(model, model, method="mtp").known.keys() == {"a.weight"}


def test_an_invalid_file_does_not_hide_the_names_of_other_files(tmp_path: Path):
    model = Path(written(tmp_path / "model", one="a.weight"))
    (model / "zero.safetensors").write_bytes(b"")
    assert "a.weight" in origin(str(model))


def test_a_checkpoint_that_is_not_on_this_host_has_no_names(tmp_path: Path):
    for model in ("someone/no-such-model", "s3://bucket/model", str(tmp_path / "gone")):
        assert "a.weight" not in origin(model)


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
def test_checkpoints_saved_per_rank_have_no_known_names(
    tmp_path: Path, load_format: str
):
    model = written(tmp_path / "model", one="a.weight")
    assert not origin(model, load_format=load_format)


def test_names_of_the_folder_are_unknown_if_a_dummy_model_was_changed(
    tmp_path: Path,
):
    model = written(tmp_path / "model", one="a.weight")
    assert "a.weight" in origin(model, load_format="dummy")
    assert not origin(model, load_format="dummy", hf_overrides={"hidden_size": 8})
    assert "a.weight" in origin(model, hf_overrides={"rope_theta": 8})


def test_shapes_are_known_where_files_agree(tmp_path: Path):
    for file, shapes in {"one": [(2, 3), (4,)], "two": [(2, 3), (5,)]}.items():
        tensors = dict(zip(("a", "b"), map(torch.zeros, shapes), strict=True))
        save_file(tensors, tmp_path / f"{file}.safetensors")
    found = origin(str(tmp_path))
    assert found.shape("a") == (2, 3)
    assert "b" in found
    assert found.shape("b") is None
    assert found.shape("c") is None


def test_the_start_checkpoint_keeps_its_names_after_a_file_is_overwritten(
    tmp_path: Path,
):
    """A trainer may save its next version over it."""
    model = written(tmp_path / "model", one="a.weight")
    found = origin(model)
    save_file({"b.weight": torch.zeros(2)}, tmp_path / "model" / "one.safetensors")
    assert "a.weight" in found
    assert "b.weight" not in found


@pytest.mark.parametrize(
    ("has_all", "passes_over", "expected"),
    [(True, False, True), (False, True, True), (False, False, False)],
    ids=["unused is unused by all", "known to be passed over", "perhaps another's"],
)
def test_a_tensor_may_be_unused_if_it_is_known_that_this_rank_serves_nothing_of_it(
    has_all: bool, passes_over: bool, expected: bool
) -> None:
    shadow: Any = SimpleNamespace(
        start_checkpoint=StartCheckpoint({"a": (1,)}),
        has_all=has_all,
        plan=SimpleNamespace(passes_over=lambda name: passes_over),
    )
    assert ShadowModel.may_idle(shadow, "a") is expected
    assert not ShadowModel.may_idle(shadow, "b")


class Warmed(Exception):
    """Ends what is under test when the kernels have been compiled."""


@pytest.mark.parametrize("method", ["_settle_in", "_open_log"])
def test_digest_kernels_are_compiled_for_what_is_served_and_what_a_trainer_may_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    """A trainer that has loaded the start checkpoint sends its dtypes."""
    tensors = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(1).bool()}
    save_file(tensors, tmp_path / "model.safetensors")
    warmed: list[set[torch.dtype]] = []

    def warm(device: torch.device, dtypes: set[torch.dtype]) -> None:
        warmed.append(dtypes)
        raise Warmed

    monkeypatch.setattr(gpu_digest, "warm", warm)
    monkeypatch.setattr(parameters, "make_hollow", lambda *_: None)
    monkeypatch.setattr(support, "layouts_differ", lambda *_: None)
    monkeypatch.setattr(quantized, "watch", lambda *_: None)
    shadow: Any = ShadowModel.__new__(ShadowModel)
    shadow.device, shadow.live = torch.device("cuda"), None
    shadow.module = torch.nn.Linear(2, 2, device="meta")
    shadow.start_checkpoint = origin(str(tmp_path))
    with pytest.raises(Warmed):
        getattr(shadow, method)(*[None] * (method == "_settle_in"))
    assert warmed == [{torch.float32, torch.bfloat16, torch.bool}]
