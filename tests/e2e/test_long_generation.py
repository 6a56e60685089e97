"""A long generation that is paused, updated and let go on, with its cache and without.

Each token is compared with plain forwards of the weights that its span names.
"""

from pathlib import Path

import pytest
import torch
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt, publish
from tests.support.engines.reference import Reference

pytestmark = pytest.mark.engine

NUM_TOKENS = 900


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> Reference:
    return Reference(folders, torch.float32)


def test_a_long_text_is_that_of_its_weights_with_kv_kept_and_cleared(
    core: EngineCore, folders: dict[str, Path], reference: Reference
) -> None:
    add(core, "long", prompt(1), max_tokens=NUM_TOKENS)
    streams = Streams(core).step(300)
    call(core, "pause", mode="in_place")
    publish(core, folders["new"], "new")
    call(core, "resume")
    streams.step(300)
    call(core, "pause", mode="retract", flush_cache=True)
    publish(core, folders["old"], "old")
    call(core, "resume")
    streams.run(most=NUM_TOKENS)
    tokens, stamps = streams.tokens["long"], streams.stamps["long"]
    assert stamps == ["old"] * 300 + ["new"] * 300 + ["old"] * 300
    assert streams.finished["long"] == "length"
    assert len(set(tokens)) > 20, "it says one thing over and over"
    kept = reference.replay(prompt(1), tokens[:600], stamps[:600])
    cleared = reference.replay(prompt(1) + tokens[:600], tokens[600:], stamps[600:])
    best = [
        logprobs[stamp].argmax().item()
        for logprobs, stamp in zip([*kept, *cleared], stamps, strict=True)
    ]
    assert best == tokens
