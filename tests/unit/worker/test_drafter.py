"""A drafter beside its model on a GPU: shadow parameters in two arenas, on the host."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader.mtp_validation import (
    is_mtp_completeness_check_enabled,
)
from vllm.model_executor.models.utils import WeightsMapper

from tests.support.shadow_on_host import (
    HostStagingWorker,
    Model,
    Sets,
    shadow_of,
    shows,
    version,
)
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.update import drafters
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model.kinds.drafter import ModelWithDrafter, share
from vllm.inflight.worker.model.support import difference
from vllm.inflight.worker.shadow.flip import flip_all
from vllm.inflight.worker.shadow.parameters import mirror_parameters
from vllm.inflight.worker.staging.adopted.extension import of_target

MTP = "mtp."


class Predictor(Model):
    """A drafter that picks its tensors from those of its model."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={MTP: ""})

    def load_weights(self, weights) -> None:
        own = [
            (name.removeprefix(MTP), tensor)
            for name, tensor in weights
            if name.startswith((MTP, "embed."))
        ]
        if len(own) < len(version(0)) and is_mtp_completeness_check_enabled():
            raise ValueError("weights missing from checkpoint")  # as DeepSeek's does
        super().load_weights(own)


class Tandems(Sets):
    """A model and its drafter, each in its arena; they share embedding and head."""

    def __init__(self, arenas: list[Arena], *, is_mtp: bool = False) -> None:
        kinds = Model, Predictor if is_mtp else Model
        models = []
        for kind, arena in zip(kinds, arenas, strict=True):
            models.append(kind(arena.empty))
            Model.load_weights(models[-1], version(0).items())
            arena.consolidate()
            arena.pair()
        self.target, self.draft = models
        self.draft.embed, self.draft.head = self.target.embed, self.target.head
        self.live = ModelWithDrafter(self.target, self.draft, is_mtp=is_mtp)
        with torch.device("meta"):
            second = [kind(torch.empty) for kind in kinds]
        share(self.live, *second)
        self.second = ModelWithDrafter(*second, is_mtp=is_mtp)
        mirror_parameters(
            self.live,
            self.second,
            lambda t: next(a for a in arenas if a.contains(t)).shadow_tensor(t),
        )
        self.arena: Any = SimpleNamespace(
            settle=lambda: [arena.settle() for arena in arenas]
        )
        self.shadow = shadow_of(self.live, self.second)
        worker: Any = SimpleNamespace(
            device=self.shadow.device,
            vllm_config=SimpleNamespace(additional_config={}),
        )
        self.stager = HostStagingWorker(worker, self.shadow, lambda: flip_all(arenas))

    def shows(self, model: int, draft: int) -> bool:
        """Whether they hold these versions; what is shared is the model's."""
        shared = {"embed.weight": version(model)["embed.weight"]}
        return shows(self.target, version(model)) and shows(
            self.draft, version(draft) | shared
        )

    def change(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """Flip what is staged, back, and again."""
        for shown, to in ((before, "next"), (after, "before"), (before, "before")):
            assert self.shows(*shown)
            self.stager.flip(to)


def of_draft(seed: int) -> dict[str, torch.Tensor]:
    return {drafters(name): tensor for name, tensor in version(seed).items()}


def of_mtp(seed: int) -> dict[str, torch.Tensor]:
    own = version(seed)
    del own["embed.weight"]
    return {MTP + name: tensor for name, tensor in own.items()}


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    device = torch.device("cpu")
    with Arena.open(device, 1 << 26) as one, Arena.open(device, 1 << 26) as other:
        yield [one, other]


def test_the_shadow_pair_shares_the_layers_that_the_live_pair_shares(arenas):
    sets = Tandems(arenas)
    assert difference(sets.live, sets.second) is None
    assert sets.shadow.required.keys() == {
        "embed.weight", "attention.qkv", "norm", "draft.attention.qkv", "draft.norm",
    }  # fmt: skip
    assert sets.second.draft.embed.weight is sets.second.target.embed.weight


def test_model_and_drafter_change_together_or_alone_at_the_flip(arenas):
    sets = Tandems(arenas)
    for weights, subset, before, after in (
        (version(1) | of_draft(2), (), (0, 0), (1, 2)),
        (version(3), (), (1, 2), (3, 2)),
        (of_draft(4), ("draft.*",), (3, 2), (3, 4)),
        (version(5) | of_draft(6), (), (3, 4), (5, 6)),
    ):
        sets.stage(weights.items(), subset)
        sets.change(before, after)


def test_an_incomplete_drafter_is_rejected_and_changes_nothing(arenas):
    sets = Tandems(arenas)
    half = of_draft(2)
    del half["draft.attention.k"]
    with pytest.raises(WeightsMismatch, match=r"missing: draft\.attention"):
        sets.stage((version(1) | half).items())
    assert sets.shows(0, 0)


def test_mtp_layers_are_updated_with_or_without_their_model(arenas):
    sets = Tandems(arenas, is_mtp=True)
    for _ in ("recorded", "proved"):
        sets.stage((version(1) | of_mtp(2)).items())
        sets.stager.flip()
        assert sets.shows(1, 2)
    loads = sets.second.target.num_loads, sets.second.draft.num_loads
    for weights, subset, before, after in (
        (version(3) | of_mtp(4), (), (1, 2), (3, 4)),
        (of_mtp(5), ("mtp.*",), (3, 4), (3, 5)),
        (version(6), tuple(version(6)), (3, 5), (6, 5)),
    ):
        sets.stage(weights.items(), subset)
        sets.change(before, after)
    assert loads == (sets.second.target.num_loads, sets.second.draft.num_loads), (
        "what both loaders do with a tensor is replayed"
    )


def test_a_model_without_its_mtp_layers_is_rejected_by_the_names_of_these_tensors(
    arenas,
):
    sets = Tandems(arenas, is_mtp=True)
    with pytest.raises(WeightsMismatch, match=r"missing: mtp\.") as refused:
        sets.stage(version(1).items())
    assert set(refused.value.tensors) == {"mtp.attention.qkv", "mtp.norm"}
    assert sets.shows(0, 0)


def test_a_block_in_an_mtp_layer_has_the_names_of_its_checkpoint():
    class Draft(torch.nn.Module):
        """Its loader renames by itself."""

    both = ModelWithDrafter(torch.nn.Module(), Draft(), is_mtp=True)
    for inside, sent in (
        ("layers.2.mtp_block.mlp.weight", "layers.2.mlp.weight"),
        ("layers.2.enorm.weight", "layers.2.enorm.weight"),
    ):
        assert both.sent_name(f"draft.{inside}") == sent
        assert both.sent_name(inside) == inside, "a name of the model's"


def test_a_block_that_its_checkpoint_has_as_well_keeps_its_name():
    """Ernie's, whose loader renames by a mapper."""

    class Draft(torch.nn.Module):
        hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_substr={"model.mtp_block.0.": "model.layers.2.mtp_block."}
        )

    both = ModelWithDrafter(torch.nn.Module(), Draft(), is_mtp=True)
    inside = "draft.model.layers.2.mtp_block.mlp.weight"
    assert both.sent_name(inside) == "model.mtp_block.0.mlp.weight"


def test_an_mtp_module_that_its_checkpoint_has_as_well_keeps_its_name():
    """Qwen3-Next's, whose loader renames by itself."""

    class Draft(torch.nn.Module):
        def is_unused_checkpoint_weight(self, name: str) -> bool:
            return not name.startswith("mtp.") and "lm_head" not in name

    both = ModelWithDrafter(torch.nn.Module(), Draft(), is_mtp=True)
    assert both.sent_name("draft.model.fc.weight") == "mtp.fc.weight"
    inside = "draft.model.layers.0.mlp.gate.weight"
    assert both.sent_name(inside) == "mtp.layers.0.mlp.gate.weight"
    assert both.sent_name("draft.lm_head.weight") == "lm_head.weight"


def test_an_arena_that_cannot_flip_takes_the_others_back(arenas):
    sets = Tandems(arenas)
    sets.stage(version(1).items())
    with Arena.open(torch.device("cpu"), 1 << 26) as unpaired:
        unpaired.empty((4,))
        with pytest.raises(RuntimeError, match="must be paired"):
            flip_all([*arenas, unpaired])
    assert sets.shows(0, 0)
    sets.stager.flip()
    assert sets.shows(1, 0)


def test_an_adopted_call_sees_the_model_and_not_its_drafter():
    """It may ask for the model's config, its class, or its parameters by name."""
    target, draft, loaded = Model(torch.zeros), Model(torch.zeros), []
    target.config = SimpleNamespace(hidden_size=8)
    root = ModelWithDrafter(target, draft)
    root.load_weights = lambda weights: loaded.extend(weights)
    seen = of_target(root)
    assert isinstance(seen, Model) and seen.config is target.config
    names = dict(seen.named_parameters())
    assert names.keys() == dict(target.named_parameters()).keys()
    assert not any(name.startswith("draft.") for name in names)
    seen.load_weights([("norm", 1)])
    assert loaded == [("norm", 1)]
    assert of_target(target) is target
