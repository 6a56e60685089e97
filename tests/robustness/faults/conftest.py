"""Plays on vLLM as it is and on ours, each once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import (  # noqa: F401
    checkpoint,
    new,
    old,
    shape,
    start,
)
from tests.robustness.faults import in_process, served
from tests.robustness.faults.row import Seen
from tests.robustness.faults.site import LEASE_S, site
from tests.support.engines.script import run_script
from vllm.inflight import ops

STOCK = {"VLLM_PLUGINS": ""}
"""In the environment: no plugin is loaded, so nothing of ours."""


@pytest.fixture(scope="module")
def upstream(old: Path, new: Path) -> Callable[[str], Seen]:  # noqa: F811
    """`upstream(play)`: what vLLM as it is did."""

    @cache
    def chain(names: tuple[str, ...]) -> dict[str, Seen]:
        if names in in_process.CHAINS:
            script = ("in_process", old, new, *names)
            return run_script(*script, room="tests.robustness.faults", env=STOCK)
        flags, env = served.server_of(names)
        with site(old, new, *flags, env=STOCK | env) as server:
            return {name: served.PLAYS[name](server) for name in names}

    def seen(play: str) -> Seen:
        chains = (*in_process.CHAINS, *served.CHAINS)
        (names,) = (names for names in chains if play in names)
        return chain(names)[play]

    return seen


@pytest.fixture(scope="module")
def here(
    old: Path,  # noqa: F811
    new: Path,  # noqa: F811
    start: Callable[..., Any],  # noqa: F811
) -> Callable[[str], Seen]:
    """`here(play)`: what ours did; one engine and one server live through most."""

    @cache
    def one_engine() -> dict[str, Seen]:
        stage = in_process.Stage(start(old, **in_process.options()), str(old), str(new))
        undisturbed = [stage.start(), stage.send(), stage.finish("new")]
        more = {"fresh": stage.tokens(), "trainer's digest": digest_of(new)}
        assert not any(map(in_process.failed, undisturbed)), undisturbed
        stage.tidy()
        seen = {}
        for name, play in in_process.PLAYS.items():
            if name not in (in_process.TWO_RANKS, in_process.ASLEEP):
                seen[name] = play(stage) | more
                stage.tidy()
        return seen

    @cache
    def alone(play: str) -> dict[str, Seen]:
        return run_script("in_process", old, new, play, room="tests.robustness.faults")

    @cache
    def two_engines() -> dict[str, Seen]:
        flags, env = served.server_of((served.TWO_ENGINES,))
        with site(old, new, *flags, env=env) as server:
            return {served.TWO_ENGINES: served.PLAYS[served.TWO_ENGINES](server)}

    @cache
    def one_server() -> dict[str, Seen]:
        lease = ("--inflight-pause-lease-s", str(LEASE_S))
        seen = {}
        with site(old, new, *lease) as server:
            for name in served.PLAYS:
                if name != served.TWO_ENGINES:
                    server.tidy()
                    seen[name] = served.PLAYS[name](server)
        return seen

    def seen(play: str) -> Seen:
        if play in (in_process.TWO_RANKS, in_process.ASLEEP):
            return alone(play)[play]
        if play == served.TWO_ENGINES:
            return two_engines()[play]
        return (one_engine if play in in_process.PLAYS else one_server)()[play]

    return seen


def digest_of(folder: Path) -> str:
    """The digest of a checkpoint, computed as a trainer does."""
    tensors = load_file(folder / "model.safetensors")
    digests = ops.digest(list(tensors.values()))
    return ops.manifest_digest(
        (name, "bfloat16", tuple(tensor.shape), digest)
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    )
