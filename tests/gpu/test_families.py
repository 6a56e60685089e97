"""Families of models on a GPU: eager and with CUDA graphs, and models that see."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_media import (  # noqa: F401 (tests, run here on a GPU)
    engine,
    fresh,
    new,
    old,
    test_a_picture_seen_before_is_seen_with_the_new_tower,
)
from tests.support.engines import oracle
from tests.support.engines.mixtures import equals_fresh_engines, scrubbed
from tests.support.engines.probe import checksums
from tests.support.engines.script import OPTIONS
from tests.support.models.families import FAMILIES, gpu_options
from tests.support.models.families_seen import record
from vllm.inflight.transport.files import receiver_engine
from vllm.inflight.transport.files.bucket_reader import FileReader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ELSEWHERE = ("llama", "qwen3", "qwen3_moe", "mixtral", "mixtral_unrouted")
"""Proved by test_engine.py, test_two_ranks.py and test_experts.py."""
UNTRIED = ("bert", "bloom")
"""The first is refused, the second is for other tests."""
COMPUTED = ("jamba", "nemotron_h")
"""Loaders that take exponentials: of what is loaded, and of the parameter."""


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ELSEWHERE + UNTRIED]
)
def test_a_family_equals_a_fresh_engine_after_every_flip_and_rollback(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    eager: bool,
) -> None:
    options = {"enforce_eager": eager} | gpu_options(family)
    if family == "mistral" and not eager:
        # FlashAttention's schedule for full graphs is wrong under one window of all
        # layers: vLLM contradicts itself (docs/models.md).
        options["compilation_config"] = {
            **OPTIONS["compilation_config"],
            "cudagraph_mode": "PIECEWISE",
        }
    folders = (checkpoint(0, family=family), checkpoint(1, family=family))
    equals_fresh_engines(
        partial(start, **options), folders, family, tmp_path, rounds=10
    )


class EveryTensorAlone(FileReader):
    """A reader for which no tensor is too small to be received in place."""

    large = 0


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("family", "hidden"),
    [
        *((name, 128) for name in FAMILIES if name not in UNTRIED),
        ("gpt2", 768),  # it transposes tensors of more than 1 MiB
    ],
)
def test_every_tensor_that_may_be_received_in_place_is_and_served_is_a_fresh_load(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    hidden: int,
    eager: bool,
) -> None:
    if hidden == 128:
        monkeypatch.setattr(receiver_engine, "FileReader", EveryTensorAlone)
    options = {"enforce_eager": eager} | gpu_options(family)
    folders = [checkpoint(n, family=family, hidden=hidden) for n in range(3)]
    llm = start(folders[0], **options)
    (stager,) = llm.collective_rpc(lambda worker: worker.vllm_inflight.stager)
    llm.update_weights_from_disk(str(folders[1]), "recorded")
    oracle.check(llm, folders[1])
    for number in (2, 0, 1):
        llm.update_weights_from_disk(str(folders[number]), str(number))
        oracle.check(llm, folders[number])
        scrubbed(llm)
        status = stager._job._status
    llm.rollback_weights()
    oracle.check(llm, folders[0])
    least = status.tensors / 3 if hidden == 128 else 0
    assert status.in_place > least, status
    record(
        family,
        torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0],
        "eager" if eager else "graphs",
        result="equal",
        hidden=hidden,
        tensors=status.tensors,
        in_place=status.in_place,
    )


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("family", COMPUTED)
def test_weights_that_a_loader_computes_equal_a_fresh_engine(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    family: str,
    staging: str,
) -> None:
    before, after = (checkpoint(seed, family=family) for seed in (0, 1))
    options = {"additional_config": {"inflight": {"staging": staging}}}
    expected = checksums(start(after, enforce_eager=True))
    llm = start(before, enforce_eager=True, **options)
    for _ in range(3):  # recorded, proved, replayed
        llm.update_weights_from_disk(str(after), "after")
        assert checksums(llm) == expected
        llm.update_weights_from_disk(str(before), "before")
