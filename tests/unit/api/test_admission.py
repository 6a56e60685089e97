"""Before the routes that generate: refusals during a pause, and marks on replies."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi.testclient import TestClient

from tests.support.route_stub import Engine, served
from vllm.inflight.api.server.admission import GENERATING, admit
from vllm.inflight.errors import EnginePaused
from vllm.inflight.outputs.headers import ReplyVersions, record
from vllm.inflight.outputs.spans import VersionSpan
from vllm.inflight.patch.api import _admitted

PAUSED = {
    "is_paused": True,
    "absorbed": False,
    "for_commit": False,
    "mode": "retract",
    "lease_left_s": None,
}


class Pausing(Engine):
    """Says of itself what it is told to, one state per engine behind the door."""

    def __init__(self, policy: str, *states: dict[str, Any]) -> None:
        super().__init__()
        self.states = states
        self.vllm_config.additional_config = {"inflight": {"when_paused": policy}}

    async def call_utility_all_async(self, *call: Any) -> list[dict[str, Any]]:
        self.asked.append(call[1])
        return [{"ok": PAUSED | state} for state in self.states]


def post(engine: Engine) -> Any:
    app = served(engine)

    @app.post("/v1/completions")
    async def completion() -> dict[str, Any]:
        await admit(engine)  # as AsyncLLM does, a second time
        return {"choices": []}

    return TestClient(app).post("/v1/completions", json={})


def test_a_request_is_rejected_while_the_engine_is_paused():
    reply = post(Pausing("reject", {"lease_left_s": 12.2}))
    assert reply.status_code == 503
    assert reply.headers["Retry-After"] == "13"
    assert reply.json()["error"]["code"] == "engine_paused"


@pytest.mark.parametrize(
    "states",
    [
        [{"is_paused": False}],
        [{"for_commit": True}],
        [{"is_paused": False}, {"for_commit": True}],
        [{"absorbed": True, "mode": "in_place"}],
    ],
    ids=["decoding", "a commit waits", "both", "absorbed"],
)
def test_a_request_is_let_in_otherwise_and_the_engine_asked_once(states: Any):
    engine = Pausing("reject", *states)
    assert post(engine).status_code == 200
    assert engine.asked == ["paused"]


def test_a_request_is_rejected_if_one_of_several_engines_is_paused():
    assert post(Pausing("reject", {"is_paused": False}, {})).status_code == 503


def test_an_engine_whose_arrivals_queue_is_not_asked():
    engine = Pausing("queue", {})
    assert post(engine).status_code == 200
    assert engine.asked == []


async def test_an_async_llm_raises_what_the_server_answers():
    with pytest.raises(EnginePaused, match="retract") as raised:
        await admit(Pausing("reject", {}))
    assert raised.value.retry_after_s == 1


@pytest.mark.parametrize("method", ["generate", "encode"])
async def test_a_rejection_in_a_pause_of_an_async_llm_reaches_its_caller(method: str):
    from vllm.exceptions import GracefulHTTPError
    from vllm.v1.engine.async_llm import AsyncLLM

    class Paused(AsyncLLM):
        """Has upstream's methods, and no engine of its own."""

        add_request = _admitted(AsyncLLM.add_request)
        log_requests = False

        def __init__(self) -> None:
            self.engine_core = Pausing("reject", {"lease_left_s": 12.2})
            self.vllm_config = self.engine_core.vllm_config

        def shutdown(self, timeout: float | None = None) -> None:
            """There is nothing to shut down."""

    with pytest.raises(EnginePaused, match="retract") as raised:
        await anext(getattr(Paused(), method)("a prompt", object(), "r"))
    assert raised.value.to_dict()["retry_after_s"] == 13
    # So upstream's own routes answer it, too.
    assert isinstance(raised.value, GracefulHTTPError)
    assert raised.value.http_status == 503


def test_every_listed_generating_path_exists_upstream():
    """By its sources: some of the routes need packages that may not be there."""
    (folder,) = find_spec("vllm.entrypoints").submodule_search_locations
    declared = {
        path
        for file in Path(folder).rglob("*.py")
        for path in re.findall(r'\.post\(\s*"([^"]+)"', file.read_text())
    }
    assert GENERATING - declared == {"/generate"}


# ------------------------------------------------------------------------ headers
def result(*spans: tuple[str, int], name: str = "r") -> Any:
    made = [
        VersionSpan(label, i, i + 1, epoch) for i, (label, epoch) in enumerate(spans)
    ]
    output = SimpleNamespace(
        index=0, weight_versions=made, finish_reason=None, stop_reason=None
    )
    return SimpleNamespace(request_id=name, outputs=[output])


@pytest.mark.parametrize("label", ["step-7", "ü %", 'a"b', "\n", "100%", "日"])
def test_a_header_can_hold_any_label(label: str):
    seen = ReplyVersions()
    seen.note(result((label, 3)))
    headers = dict(seen.headers())
    value = headers[b"x-weight-version"].decode("ascii")
    assert unquote(value) == label
    assert value.isprintable() and " " not in value
    assert headers[b"x-weight-epoch"] == b"3"


def test_headers_name_the_newest_version_and_the_range_of_epochs():
    seen = ReplyVersions()
    seen.note(result(("a", 1)))
    seen.note(result(("a", 1), ("b", 2), ("c", 3)))
    seen.note(result(("b", 2), name="other"))
    assert dict(seen.headers()) == {
        b"x-weight-version": b"c",
        b"x-weight-epoch": b"1-3",
    }
    assert [span.version for span in seen.last or ()] == ["b"]


def test_a_reply_without_versions_has_no_version_headers():
    assert ReplyVersions().headers() == []
    assert ReplyVersions().last is None


def test_a_reply_is_marked_with_what_was_seen_in_its_context():
    engine = Pausing("queue", {})
    app = served(engine)

    @app.post("/v1/completions")
    async def completion() -> dict[str, Any]:
        record.get().note(result(("v", 5)))
        return {}

    headers = TestClient(app).post("/v1/completions", json={}).headers
    assert headers["X-Weight-Version"] == "v"
    assert record.get() is None
