"""Tensors of parts that an engine was built without may come with a whole update."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.utils import StageMissingLayer, WeightsMapper

from tests.support.shadow_on_host import Sets, shows, version
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model.kinds.drafter import ModelWithDrafter
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors


def spares_of(
    model: torch.nn.Module,
    hf: dict[str, bool | None] | None = None,
    *,
    pools: bool = False,
    **text: int,
) -> IgnoredTensors:
    config = SimpleNamespace(
        hf_config=SimpleNamespace(**(hf or {})),
        hf_text_config=SimpleNamespace(**text),
        runner_type="pooling" if pools else "generate",
        word_embeddings_untied_by_checkpoint=False,
    )
    return IgnoredTensors.of(model, config)


def test_tensors_of_a_tower_that_was_not_built_are_known_by_their_checkpoints_names():
    model = torch.nn.Module()
    model.visual = StageMissingLayer("image")
    model.proj = torch.nn.Linear(2, 2)
    spares = spares_of(model)
    assert spares.has_left_out("visual.blocks.0.weight")
    assert not spares.has_left_out("visuals.weight")
    assert not spares.has_left_out("proj.weight")
    assert not spares.has_left_out("model.visual.blocks.0.weight")
    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.": ""})
    assert spares_of(model).has_left_out("model.visual.blocks.0.weight")


@pytest.mark.parametrize(
    ("name", "is_mtp"),
    [
        ("mtp.fc.weight", True),
        ("mtp.layers.0.mlp.down_proj.weight", True),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("model.mtp_block.0.self_attn.q_proj.weight", True),
        ("model.layers.2.eh_proj.weight", True),
        ("model.language_model.layers.2.eh_proj.weight", True),
        ("model.layers.1.mlp.down_proj.weight", False),
        ("model.layers.3.mlp.down_proj.weight", False),
        ("model.layers.20.mlp.down_proj.weight", False),
        ("vision_tower.layers.2.mlp.down_proj.weight", False),
        ("model.mtpx.weight", False),
    ],
)
def test_mtp_layers_are_ignored_without_an_mtp_drafter(name: str, is_mtp: bool):
    model = torch.nn.Module()
    for field in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        spares = spares_of(model, num_hidden_layers=2, **{field: 1})
        assert spares.has_left_out(name) == is_mtp
    assert not spares_of(model, num_hidden_layers=2).has_left_out(name)
    model.is_mtp = True
    spares = spares_of(model, num_hidden_layers=2, num_nextn_predict_layers=1)
    assert not spares.has_left_out(name)


def test_a_tensor_that_the_mapper_of_the_model_drops_is_ignored():
    model = torch.nn.Module()
    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"mtp.": None})
    dropped = {"mtp.fc.weight": torch.ones(2)}
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = Sets(arena)
        with pytest.raises(WeightsMismatch, match=r"unknown: mtp\.fc\.weight"):
            sets.stage((version(1) | dropped).items())
        sets.shadow.ignored = spares_of(model)
        for seed in (1, 2, 3):  # recorded, proved, replayed
            sets.stage((version(seed) | dropped).items())
            sets.stager.flip()
            assert shows(sets.live, version(seed))
        with pytest.raises(WeightsMismatch, match=r"unknown: mtp\.fc\.weight"):
            sets.stage(dropped.items(), ("mtp.*",))


def test_a_tensor_is_not_ignored_that_the_mapper_keeps_or_drops_for_a_drafter():
    model = torch.nn.Module()
    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"mtp.": None})
    unset = {"tie_word_embeddings": None}
    assert not spares_of(model, hf=unset).has_left_out("model.norm.weight")
    model.is_mtp = True  # it is the drafter's
    assert not spares_of(model).has_left_out("mtp.fc.weight")


@pytest.mark.parametrize("has_own", [True, False])
def test_a_drafter_may_have_a_head_though_its_models_is_tied(has_own: bool):
    target, draft = torch.nn.Module(), torch.nn.Module()
    target.embed_tokens = torch.nn.Embedding(4, 2)
    draft.lm_head = torch.nn.Linear(2, 4, bias=False)
    if not has_own:
        draft.lm_head.weight = target.embed_tokens.weight
    spares = spares_of(
        ModelWithDrafter(target, draft), hf={"tie_word_embeddings": True}
    )
    assert "lm_head.weight" in spares and spares.is_tied("lm_head.weight")
    assert ("draft.lm_head.weight" in spares) != has_own
    assert not spares.is_tied("draft.lm_head.weight")
    assert "draft.t2d" in spares and "draft.d2t" not in spares
    assert "draft.t2d" not in spares_of(target)


def test_a_model_that_pools_has_no_head_to_be_compared():
    spares = spares_of(torch.nn.Module(), hf={"tie_word_embeddings": True}, pools=True)
    assert "lm_head.weight" in spares and not spares.is_tied("lm_head.weight")
