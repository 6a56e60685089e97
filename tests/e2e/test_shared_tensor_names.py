"""One tensor under two names: equal digests mean equal weights all the same.

Mistral's loader takes the names of Mistral's own checkpoints as well.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.mixtures import said
from vllm.inflight.errors import Cause, WeightsMismatch

pytestmark = pytest.mark.engine

O_PROJ = "model.layers.0.self_attn.o_proj.weight"
WO = "layers.0.attention.wo.weight"
"""The same weight."""


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {n: checkpoint(seed, family="mistral") for seed, n in enumerate("abc")}


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], folders: dict[str, Path]) -> Any:
    return start(folders["a"])


def weight(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[O_PROJ]


@pytest.fixture
def replace(engine: Any, tmp_path: Path) -> Callable[..., Any]:
    """`replace(name=tensor, …)`: serve these tensors, and the rest as it is."""

    def update(**named: torch.Tensor) -> Any:
        tensors = {{"o_proj": O_PROJ, "wo": WO}[n]: t for n, t in named.items()}
        save_file(tensors, tmp_path / "part.safetensors")
        path = str(tmp_path / "part.safetensors")
        return engine.update_weights_from_disk(path, subset=list(tensors))

    return update


def test_two_orders_of_the_same_updates_have_no_digest_in_common(
    engine: Any, folders: dict[str, Path], replace: Callable[..., Any]
) -> None:
    first, second = weight(folders["b"]), weight(folders["c"])
    found: dict[str, list[Any]] = {}
    for order in (("o_proj", "wo"), ("wo", "o_proj")):
        engine.update_weights_from_disk(str(folders["a"]), "whole")
        tensors = {"o_proj": first, "wo": second}
        for name in order:
            reply = replace(**{name: tensors[name]})
            served = said(engine)[1]
            if reply["digest"] is not None:
                found.setdefault(reply["digest"], []).append(served)
            assert (reply["drift"] is None) == (reply["digest"] is None)
            assert engine.weight_info()["digest"] == reply["digest"]
    assert all(served == same[0] for same in found.values() for served in same)
    # It is known again after a whole version, and after one that is left for it.
    whole = engine.update_weights_from_disk(str(folders["a"]), "whole")["digest"]
    assert replace(o_proj=first)["digest"] not in (None, whole)
    replace(wo=second)
    engine.rollback_weights()
    assert engine.weight_info()["digest"] is not None


def test_a_tensor_sent_under_its_other_name_has_a_known_digest(
    engine: Any, folders: dict[str, Path], replace: Callable[..., Any], tmp_path: Path
) -> None:
    tensors = load_file(folders["a"] / "model.safetensors")
    tensors[WO] = tensors.pop(O_PROJ)
    save_file(tensors, tmp_path / "whole.safetensors")
    engine.update_weights_from_disk(str(tmp_path / "whole.safetensors"), "whole")
    assert replace(wo=weight(folders["b"]))["digest"] is not None
    assert replace(o_proj=weight(folders["c"]))["digest"] is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_update_that_sends_one_tensor_under_two_names_is_rejected(
    engine: Any, folders: dict[str, Path], tmp_path: Path, is_whole: bool
) -> None:
    whole = load_file(folders["a"] / "model.safetensors") if is_whole else {}
    others = {n: t for n, t in whole.items() if n != O_PROJ}
    pair = {O_PROJ: weight(folders["b"]), WO: weight(folders["c"])}
    before = said(engine)
    for number, order in enumerate(((O_PROJ, WO), (WO, O_PROJ))):
        # Files are read in the order of their names.
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(others | {order[0]: pair[order[0]]}, folder / "1.safetensors")
        save_file({order[1]: pair[order[1]]}, folder / "2.safetensors")
        subset = None if is_whole else [O_PROJ, WO]
        with pytest.raises(WeightsMismatch, match="by tensors of two names") as refusal:
            engine.update_weights_from_disk(str(folder), "both", subset=subset)
        assert refusal.value.causes == {Cause.DUPLICATE: 1}
        assert said(engine) == before
