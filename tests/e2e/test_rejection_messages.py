"""A refusal names all that is wrong, and each thing once, whatever model it is.

Of several families: with a mapping of names and without one, with fused tensors, with
experts, and a model that sees, whose tensors have other names than its parameters.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.engines.mixtures import behind
from tests.support.engines.probe import greedy, send
from tests.support.models.families import cpu_options
from tests.support.models.seeing import SEEING as SEEN
from tests.support.models.tiny_vision import make_seeing
from vllm.inflight.errors import CAUSES, Cause, WeightsMismatch
from vllm.inflight.tensor_names import matcher
from vllm.inflight.transport.files import receiver_engine

pytestmark = pytest.mark.engine

FAMILIES = ("llama", "gpt2", "mixtral", "phi3", "idefics3")
SEEING = "idefics3"
"""Without its pictures, so that nothing is wanted that the CPU build lacks."""

OTHER = {"weight_transfer_config": WeightTransferConfig(backend="other")}
WAYS = ("files", "announced", "streamed")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine, the checkpoint that it started from, and what it has no use for."""

    llm: Any
    tensors: Tensors
    folder: Path
    idle: Callable[[str], bool]

    def save(self, tensors: Tensors) -> None:
        """Write the file that is sent."""
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
            self.folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    def update(self, tensors: Tensors, way: str, subset: Any = None) -> None:
        """Serve what has been saved, under `way` as its label.

        Args:
            tensors: what it is.
            way: `files`, whose headers are read first; `announced`, the same with a
                manifest; `streamed`, by a transport that says nothing beforehand.
            subset: the patterns that declare it.

        """
        if way == "streamed":
            self.llm.start_weight_update(weight_version=way)
            send(self.llm, self.folder)
            self.llm.finish_weight_update()
            return
        how = {"manifest": manifest(tensors)} if way == "announced" else {}
        path = str(self.folder)
        self.llm.update_weights_from_disk(path, way, subset=subset, **how)

    def refused(
        self, tensors: Tensors, way: str = "files", subset: Any = None
    ) -> WeightsMismatch:
        """How an update of these tensors is refused."""
        self.save(tensors)
        with pytest.raises(WeightsMismatch) as refusal:
            self.update(tensors, way, subset)
        assert self.llm.weight_update_status()["active"] is None
        return refusal.value

    def one_of_each_kind(self) -> Iterator[str]:
        """A tensor of each kind: of those that differ in numbers alone, the last."""
        used = (name for name in self.tensors if not self.idle(name))
        kinds = {re.sub(r"\d+", "#", name): name for name in used}
        yield from kinds.values()


@pytest.fixture(scope="module", params=FAMILIES)
def subject(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Subject:
    family, folder = request.param, tmp_path_factory.mktemp("sent")
    idle = matcher(SEEN[SEEING].tower if family == SEEING else ())
    if family == SEEING:
        old = make_seeing(tmp_path_factory.mktemp("seeing") / "old", 0, family)
        llm = start(old, limit_mm_per_prompt={"image": 0}, **OTHER)
    else:
        old = checkpoint(0, family=family)
        llm = start(old, **cpu_options(family), **OTHER)
    return Subject(llm, load_file(old / "model.safetensors"), folder, idle)


def manifest(tensors: Tensors) -> dict[str, Any]:
    """As a publisher announces them, whatever it has then."""
    return {
        "format": 1,
        "tensors": [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for name, tensor in tensors.items()
        ],
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefix", ["module.", "base_model.model."])
def test_names_with_a_wrong_prefix_are_reported_with_the_name_map_that_mends_them(
    subject: Subject, prefix: str, way: str
) -> None:
    sent = {prefix + name: tensor for name, tensor in subject.tensors.items()}
    refusal = subject.refused(sent, way)
    assert refusal.causes == {Cause.UNKNOWN: len(sent)}
    assert refusal.num_tensors == len(sent)
    assert set(refusal.tensors) <= sent.keys()
    assert len(refusal.tensors) == min(64, len(sent))
    line = f"name_map=lambda name: name.removeprefix({prefix!r})"
    assert str(refusal).count(line) == 1
    assert f"{len(sent)} of the {len(sent)} unknown names" in str(refusal)
    assert refusal.remedy == CAUSES[Cause.UNKNOWN][1]


def test_a_tensor_that_is_not_finite_is_reported_only_once(subject: Subject) -> None:
    for name in subject.one_of_each_kind():
        broken = subject.tensors[name].clone()
        broken.view(-1)[0] = torch.nan
        refusal = subject.refused({**subject.tensors, name: broken})
        assert (refusal.causes, refusal.tensors) == ({Cause.NOT_FINITE: 1}, [name])
        told = f"{name}: 1 of its {broken.numel()} elements is NaN or Inf"
        assert told in str(refusal)
        assert refusal.remedy == CAUSES[Cause.NOT_FINITE][1]


@pytest.mark.parametrize("way", ["files", "streamed"])
def test_a_tensor_of_another_shape_is_reported_only_once(
    subject: Subject, way: str
) -> None:
    for name in subject.one_of_each_kind():
        cut = subject.tensors[name][:-1]
        refusal = subject.refused({**subject.tensors, name: cut}, way)
        assert (refusal.causes, refusal.tensors) == ({Cause.SHAPE: 1}, [name])
        assert str(refusal).count(name) == 1
        assert refusal.remedy == CAUSES[Cause.SHAPE][1]


@pytest.mark.parametrize("way", ["files", "streamed"])
def test_a_tensor_that_is_left_out_is_missing_by_its_own_name(
    subject: Subject, way: str
) -> None:
    for name in subject.one_of_each_kind():
        left = {n: t for n, t in subject.tensors.items() if n != name}
        refusal = subject.refused(left, way)
        assert (refusal.causes, refusal.tensors) == ({Cause.MISSING: 1}, [name])
        assert refusal.remedy == CAUSES[Cause.MISSING][1]


@pytest.mark.parametrize("way", ["files", "streamed"])
def test_a_misspelt_name_is_reported_as_unknown_and_not_also_as_missing(
    subject: Subject, way: str
) -> None:
    for name in subject.one_of_each_kind():
        stem, dot, last = name.rpartition(".")
        for slip in (f"{stem}x{dot}{last}", f"{name[:-2]}{name[-1]}{name[-2]}"):
            sent = {n: t for n, t in subject.tensors.items() if n != name}
            refusal = subject.refused({**sent, slip: subject.tensors[name]}, way)
            assert (refusal.causes, refusal.tensors) == ({Cause.UNKNOWN: 1}, [slip])
            assert f"{slip} (nearest: {name}" in str(refusal)
            assert refusal.remedy == CAUSES[Cause.UNKNOWN][1]


@pytest.mark.parametrize("way", ["files", "streamed"])
def test_each_of_several_mistakes_is_reported_with_its_own_remedy(
    subject: Subject, way: str
) -> None:
    first, second, third, *_ = subject.one_of_each_kind()
    sent = dict(subject.tensors)
    if way == "files":  # what headers show is told before the first tensor is read
        sent[f"{first}.strange"] = sent.pop(first)
        mistakes = {f"{first}.strange": Cause.UNKNOWN}
    else:
        sent[first] = sent[first].clone()
        sent[first].view(-1)[:2] = torch.inf
        mistakes = {first: Cause.NOT_FINITE}
    sent[second] = sent[second][1:]
    del sent[third]
    mistakes |= {second: Cause.SHAPE, third: Cause.MISSING}
    refusal = subject.refused(sent, way)
    assert set(refusal.tensors) == mistakes.keys()
    assert refusal.causes == dict.fromkeys(mistakes.values(), 1)
    for cause in mistakes.values():
        assert f"{cause.replace('_', ' ')}: {CAUSES[cause][1]}" in refusal.remedy


def test_a_subset_pattern_without_a_match_is_reported_instead_of_each_tensor(
    subject: Subject,
) -> None:
    for patterns in (["*.nothing.*"], ["*.nothing.*", "nor.this"]):
        refusal = subject.refused(subject.tensors, subset=patterns)
        assert refusal.causes == {Cause.SUBSET: len(patterns)}
        assert refusal.tensors == patterns
        assert f"no tensor matches {', '.join(patterns)} of the subset" in str(refusal)
        assert refusal.remedy == CAUSES[Cause.SUBSET][1]
    name = next(subject.one_of_each_kind())
    refusal = subject.refused(
        {name: subject.tensors[name]}, subset=[name, "*.nothing.*"]
    )
    assert (refusal.causes, refusal.tensors) == ({Cause.SUBSET: 1}, ["*.nothing.*"])
    declared, other, *_ = subject.one_of_each_kind()
    sent = {n: subject.tensors[n] for n in (declared, other)}
    refusal = subject.refused(sent, subset=[declared])
    assert (refusal.causes, refusal.tensors) == ({Cause.SUBSET: 1}, [other])


# ---------------------------------------------------- before the first byte has come
def test_a_wrong_manifest_is_rejected_before_anything_is_sent(
    subject: Subject,
) -> None:
    names = [*subject.one_of_each_kind()]
    wrong = {n: t for n, t in subject.tensors.items() if n != names[1]}
    wrong[names[0]] = wrong[names[0]][:-1]
    wrong[names[2]] = wrong[names[2]].to(torch.int32)
    wrong["module.strange.weight"] = torch.ones(3)
    untouched = behind(subject.llm)
    subject.llm.start_weight_update(manifest=manifest(wrong))
    with pytest.raises(WeightsMismatch) as refusal:
        subject.llm.update_weights({"update_info": {"path": "/no/such/folder"}})
    assert refusal.value.causes == {
        Cause.SHAPE: 1,
        Cause.MISSING: 1,
        Cause.DTYPE: 1,
        Cause.UNKNOWN: 1,
    }
    assert set(refusal.value.tensors) == {*names[:3], "module.strange.weight"}
    assert behind(subject.llm) == untouched


def test_files_whose_headers_are_wrong_are_not_read(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(receiver_engine, "_fill", read)
    name = next(subject.one_of_each_kind())
    refusal = subject.refused({**subject.tensors, name: subject.tensors[name][:-1]})
    assert (refusal.causes, refusal.tensors) == ({Cause.SHAPE: 1}, [name])


@pytest.mark.parametrize("way", ["files", "announced"])
def test_an_update_rejected_before_its_first_byte_keeps_the_rollback_target(
    subject: Subject, way: str
) -> None:
    """Names that only the model's loader can judge, and shapes, and what is missing."""
    llm, tensors = subject.llm, dict(subject.tensors)
    first, second, *_ = subject.one_of_each_kind()
    told = []
    for rows in (2, 3):
        subject.save(tensors | {first: tensors[first].roll(rows, 0)})
        llm.update_weights_from_disk(str(subject.folder), str(rows))
        told.append(greedy(llm))
    assert told[0] != told[1]
    rest = {n: t for n, t in tensors.items() if n != second}
    for wrong, cause in (
        ({"module." + n: t for n, t in tensors.items()}, Cause.UNKNOWN),
        (tensors | {"module.strange.weight": torch.ones(3)}, Cause.UNKNOWN),
        (rest | {second: tensors[second][:-1]}, Cause.SHAPE),
        (rest, Cause.MISSING),
    ):
        assert subject.refused(wrong, way).causes.keys() == {cause}
        assert llm.weight_info()["previous"]["weight_version"] == "2"
    assert llm.rollback_weights()["weight_version"] == "2"
    assert greedy(llm) == told[0]
    assert llm.rollback_weights()["weight_version"] == "3"
    assert greedy(llm) == told[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_good_version_is_not_foreseen_to_be_bad(subject: Subject, way: str) -> None:
    """Nor one of another order, in other lengths of floats."""
    sent = {n: t.float() for n, t in reversed(subject.tensors.items())}
    for tensors in (subject.tensors, sent):
        subject.save(tensors)
        subject.update(tensors, way)
        assert subject.llm.get_weight_version() == way
