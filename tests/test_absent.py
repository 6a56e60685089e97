"""What an engine was told to leave out may come with an update of all the rest."""

import torch
from vllm.model_executor.models.utils import StageMissingLayer, WeightsMapper

from vllm.inflight.stage.absent import is_absent


def test_tensors_of_a_tower_that_was_not_built_are_known_by_their_checkpoints_names():
    model = torch.nn.Module()
    model.visual = StageMissingLayer("image")
    model.proj = torch.nn.Linear(2, 2)
    assert is_absent(model, "visual.blocks.0.weight")
    assert not is_absent(model, "visuals.weight")
    assert not is_absent(model, "proj.weight")
    assert not is_absent(model, "model.visual.blocks.0.weight")
    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.": ""})
    assert is_absent(model, "model.visual.blocks.0.weight")
