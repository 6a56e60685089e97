"""One trainer, and two servers that apply deltas in different ways.

Both serve the same version, or the publish fails on both. One that has ended and starts
again is brought to the version of the other one.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.deltas import stepped
from tests.support.serving import Server
from vllm.inflight.errors import ChangeLogFull, EngineUnreachable
from vllm.inflight.trainer import Outcome, Publisher

pytestmark = pytest.mark.engine

LOCAL = ("--weight-transfer-config", '{"backend": "local"}')
LOG = (
    *("--inflight-staging", "delta", "--inflight-delta-gib", "0.0001"),
    *("--inflight-delta-host-gib", "0.0001"),
    *("--worker-extension-cls", "tests.support.engines.unpacked_ranks.Unpacked"),
)
"""A log with room for some 40,000 elements of bf16."""


@pytest.fixture(scope="module")
def servers(old: Path) -> Iterator[tuple[Server, Server]]:
    """One with a second set, and one with a log."""
    with Server(old, *LOCAL) as first, Server(old, *LOCAL, *LOG) as second:
        yield first, second


def test_engines_that_serve_different_versions_are_brought_together_by_a_publish(
    servers: tuple[Server, Server], old: Path
) -> None:
    weights = load_file(old / "model.safetensors")
    urls = [server.url for server in servers]

    def served() -> set[str]:
        return {
            server.client.get("/weight_info").json()["digest"] for server in servers
        }

    with Publisher(urls, lambda: weights) as to:

        def published(share: float = 0.01) -> Outcome:
            nonlocal weights
            weights = stepped(weights, 1, share=share)
            outcome = to.publish()
            assert served() == {outcome.digest}
            return outcome

        assert not published().is_delta
        for _ in range(3):
            last = published()
            assert last.is_delta
        size = sum(tensor.nbytes for tensor in weights.values())
        for server in servers:  # one at a time is one version behind the other
            server.post("/rollback_weights")
            assert len(served()) == 2
            outcome = published()
            assert outcome.is_delta
            # What two updates have changed goes to both.
            assert last.num_bytes < outcome.num_bytes < 4 * last.num_bytes < size
            single = published()
            assert single.is_delta and single.num_bytes < 1.5 * last.num_bytes
        # One at a time serves a version that this trainer does not know.
        for server in servers:
            with Publisher(server.url, stepped(weights, 3), delta="off") as other:
                other.publish()
            assert len(served()) == 2
            assert not published().is_delta
            assert published().is_delta
        # The second engine has no room for so much.
        before, kept = served(), weights
        weights = stepped(weights, 2, share=0.9)
        with pytest.raises(ChangeLogFull):
            to.publish("too much")
        assert served() == before
        weights = kept
        before_last = published().digest
        outcome = published()
        assert outcome.is_delta
        last = outcome.digest
        to.rollback()
        assert served() == {before_last}
        to.rollback()
        assert served() == {last}


def test_a_server_that_was_killed_and_started_again_gets_the_next_version(
    servers: tuple[Server, Server], old: Path
) -> None:
    """It serves the weights it starts with, and nobody knows their digest.

    This is the last test here, as it ends one of the servers of all.
    """
    weights = load_file(old / "model.safetensors")
    running, urls = list(servers), [server.url for server in servers]
    body = {"model": "tiny", "prompt": "The weights", "max_tokens": 16}
    body |= {"temperature": 0, "ignore_eos": True}

    def says(server: Server) -> str:
        return str(server.post("/v1/completions", body)["choices"][0]["text"])

    def served(server: Server) -> str:
        return str(server.client.get("/weight_info").json()["digest"])

    with Publisher(urls, lambda: weights, timeout_s=30) as to, ExitStack() as again:

        def published(is_delta: bool) -> None:
            nonlocal weights
            weights = stepped(weights, 1, share=0.01)
            outcome = to.publish()
            assert outcome.is_delta is is_delta
            assert {served(server) for server in running} == {outcome.digest}

        to.publish()
        published(is_delta=True)
        before = served(running[0])
        running[1].kill()
        weights = stepped(weights, 2, share=0.01)
        with pytest.raises(EngineUnreachable):
            to.publish()
        assert served(running[0]) == before
        port = int(urls[1].rpartition(":")[2])
        running[1] = again.enter_context(Server(old, *LOCAL, *LOG, port=port))
        published(is_delta=False)
        published(is_delta=True)
        said = says(running[1])
        with Publisher(urls[1], weights, delta="off") as whole:
            whole.publish()
        assert says(running[1]) == said
