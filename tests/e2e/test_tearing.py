"""Tearing: every step's logits are those of exactly one version, the stamped one.

The versions differ by far more than the numerical noise between the engine and
the reference, so a step that mixed two of them would match none.
"""

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engines.probe import outputs_during
from tests.support.engines.reference import Reference, labels_of
from vllm.inflight.worker.shadow.flip import Exchange

pytestmark = pytest.mark.engine

NOISE = 2e-3
"""Largest difference seen between engine and reference, with room."""


def stream_under_commits(llm: Any, paths: dict[str, Path], num_commits: int) -> Any:
    """Decode in this thread while another commits; returns all outputs."""

    def commit(label: str) -> None:
        llm.update_weights_from_disk(str(paths[label]), label)

    return stream_under(commit, llm, list(paths), num_commits)


def stream_under_reloads(
    llm: Any, paths: dict[str, Path], num_reloads: int
) -> tuple[Any, dict[str, str]]:
    """The same with upstream's way; returns the outputs, and what labels stand for."""
    versions = {}

    def reload(label: str) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": paths[label]})
        versions[llm.get_weight_version()] = label

    outputs = stream_under(reload, llm, list(paths), num_reloads)
    return outputs, versions


def stream_under(
    change: Callable[[str], None], llm: Any, labels: list[str], num_changes: int
) -> Any:
    """Decode in this thread while another changes the weights; returns all outputs."""

    def change_all() -> None:
        for index in range(num_changes):
            change(labels[(index + 1) % len(labels)])

    sampling = (
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=120, ignore_eos=True, logprobs=0
        )
        for seed in count(1)
    )
    return outputs_during(change_all, llm, 4, sampling)


def mismatches(
    outputs: Any,
    reference: Reference,
    first_label: str,
    noise: float = NOISE,
    versions: Mapping[str, str] | None = None,
) -> list[str]:
    """Steps whose log-probability is not that of their version and no other.

    Args:
        outputs: of requests.
        reference: says what is right.
        first_label: of the version that the engine has started with.
        noise: between the two.
        versions: what labels stand for that are no version's.

    """
    known = {"default": first_label} | dict(versions or {})
    wrong = []
    for number, request in enumerate(outputs):
        output = request.outputs[0]
        labels = [known.get(name, name) for name in labels_of(output)]
        steps = reference.replay(request.prompt_token_ids, output.token_ids, labels)
        for index, logprobs in enumerate(steps):
            token = output.token_ids[index]
            got = output.logprobs[index][token].logprob
            near = [
                name
                for name, values in logprobs.items()
                if abs(values[token].item() - got) < noise
            ]
            if labels[index] not in near:
                wanted = {
                    name: f"{v[token].item():.4f}" for name, v in logprobs.items()
                }
                wrong.append(
                    f"request {number}, token {index} is not of {labels[index]}: "
                    f"{got:.4f} of {wanted}"
                )
            elif len(near) > 1 and apart(logprobs) < 10 * noise:
                wrong.append(f"request {number}, token {index} cannot be told apart")
    return wrong


def apart(logprobs: dict[str, torch.Tensor]) -> float:
    """Smallest of the largest differences between two versions' distributions."""
    values = list(logprobs.values())
    return min(
        (x - y).abs().max().item()
        for i, x in enumerate(values)
        for y in values[i + 1 :]
    )


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], versions: dict[str, Path]) -> Any:
    # Staging need not be modest here: it is the commits that are looked at.
    return start(
        versions["a"],
        dtype="float32",
        additional_config={"inflight": {"stage_share": 1}},
    )


def test_every_step_of_120_commits_under_load_is_of_one_version(
    llm: Any, versions: dict[str, Path], reference: Reference
) -> None:
    outputs = stream_under_commits(llm, versions, 120)
    assert llm.weight_info()["epoch"] >= 120
    spanning = sum(len(o.outputs[0].weight_versions) > 1 for o in outputs)
    assert spanning > len(outputs) // 2, "the commits did not come under load"
    assert mismatches(outputs, reference, "a") == []


def test_a_torn_flip_is_found_by_the_test_above(
    llm: Any,
    versions: dict[str, Path],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Exchange.__init__

    def half(self: Exchange, *args: Any) -> None:
        whole(self, *args)
        del self._kept[len(self._kept) // 2 :]

    monkeypatch.setattr(Exchange, "__init__", half)
    outputs = stream_under_commits(llm, versions, 4)
    assert len(mismatches(outputs, reference, "a")) > 10


def test_every_step_around_upstreams_reloads_is_of_one_version(
    llm: Any, versions: dict[str, Path], reference: Reference
) -> None:
    llm.update_weights_from_disk(str(versions["a"]), "a")
    outputs, reloaded = stream_under_reloads(llm, versions, 90)
    assert sum(len(o.outputs[0].weight_versions) for o in outputs) > 40
    assert mismatches(outputs, reference, "a", versions=reloaded) == []
