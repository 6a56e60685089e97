"""The names in the checkpoint that an engine started from."""

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from vllm.inflight.stage.origin import Origin, origin_of


def origin(model: str, draft: str | None = None) -> Origin:
    def config(path: str) -> SimpleNamespace:
        return SimpleNamespace(model=path, revision=None)

    drafting = draft and SimpleNamespace(draft_model_config=config(draft))
    return Origin(
        SimpleNamespace(
            load_config=SimpleNamespace(download_dir=None),
            model_config=config(model),
            speculative_config=drafting,
        )
    )


def written(folder: Path, **files: str) -> str:
    folder.mkdir()
    for file, name in files.items():
        save_file({name: torch.zeros(1)}, folder / f"{file}.safetensors")
    return str(folder)


def test_all_files_are_read_and_a_drafters_names_are_told_apart(tmp_path: Path):
    model = written(tmp_path / "model", one="a.weight", two="b.weight")
    draft = written(tmp_path / "draft", one="c.weight")
    found = origin(model, draft)
    assert all(name in found for name in ("a.weight", "b.weight", "draft.c.weight"))
    assert all(name not in found for name in ("c.weight", "draft.a.weight", "a"))


def test_a_file_that_is_none_has_no_names_and_hides_no_others(tmp_path: Path):
    model = Path(written(tmp_path / "model", one="a.weight"))
    (model / "zero.safetensors").write_bytes(b"")
    assert "a.weight" in origin(str(model))


def test_what_is_not_on_this_host_has_no_names(tmp_path: Path):
    for model in ("someone/no-such-model", "s3://bucket/model", str(tmp_path / "gone")):
        assert "a.weight" not in origin(model)


def test_where_ranks_hold_parts_nothing_is_known_to_be_of_no_use(tmp_path: Path):
    model = written(tmp_path / "model", one="a.weight")
    config = SimpleNamespace(
        load_config=SimpleNamespace(download_dir=None),
        model_config=SimpleNamespace(model=model, revision=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    live = torch.nn.Module()
    assert "a.weight" in origin_of(live, config)
    live._expert_map = torch.zeros(2)
    assert "a.weight" not in origin_of(live, config)
    del live._expert_map
    config.parallel_config.pipeline_parallel_size = 2
    assert "a.weight" not in origin_of(live, config)
