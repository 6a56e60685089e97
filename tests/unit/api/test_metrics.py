"""Metrics: what engines counted, in Prometheus' text form."""

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.support.route_stub import Engine, served
from vllm.inflight.api.server import metrics as route
from vllm.inflight.api.server.metrics import exposition
from vllm.inflight.engine.counters import Counters
from vllm.inflight.update import PauseMode

REST = {
    "epoch": 3,
    "weight_version": 'step "3"',
    "digest": None,
    "drift": 0.002,
    "outcomes": {"committed": 2, "weights_mismatch": 1},
    "paused": False,
    "pause_absorbed": True,
    "leases_expired": 1,
    "updating": True,
    "scrubs": {"equal": 3},
    "weights_differ": False,
    "update_staged_bytes": 512,
    "update_stalled_seconds": 4.5,
    "wire_window_bytes": 0,
    "wire_bucket_wait_ms": 0.5,
}


def values(engines):
    """Every sample, by its name and labels."""
    return samples(exposition(dict(enumerate(engines))).decode())


def samples(text):
    """The same of a text that is there."""
    return {
        (
            sample.name.removeprefix("vllm:inflight_"),
            *sample.labels.values(),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_names_every_metric():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    told = exposition({0: Counters().to_dict() | REST}).decode()
    families = {family.name for family in text_string_to_metric_families(told)}
    assert len(families) > 10
    assert [name for name in families if name not in page] == []


def test_metrics_are_reported_for_each_engine():
    counts = Counters()
    for gap_ms, treated in ((0.4, {"num_retracted": 5}), (7.0, {"num_aborted": 2})):
        counts.switched({"gap_ms": gap_ms})
        counts.treated(treated)
    counts.num_absorbed = 2
    counts.enforced["sleep"] += 1
    counts.outside_writes["load_mine"] += 3
    seen = values([counts.to_dict() | REST, Counters().to_dict() | REST])
    assert seen["epoch", "0"] == seen["epoch", "1"] == 3
    assert seen["requests_total", "0", "retracted"] == 5
    assert seen["requests_total", "0", "aborted"] == 2
    assert seen["updates_total", "0", "weights_mismatch"] == 1
    assert seen["weights_info", "", "0", 'step "3"'] == 1  # digest, engine, version
    assert seen["drift", "0"] == 0.002
    assert seen["update_stalled_seconds", "0"] == 4.5
    assert seen["pauses_absorbed_total", "0"] == 2
    assert seen["pauses_enforced_total", "0", "sleep"] == 1
    assert seen["out_of_band_writes_total", "load_mine", "0"] == 3
    assert (seen["pause_absorbed", "0"], seen["paused", "0"]) == (1, 0)
    gaps = "commit_gap_milliseconds"
    assert seen[f"{gaps}_bucket", "0", "0.5"] == 1
    assert seen[f"{gaps}_bucket", "0", "10"] == seen[f"{gaps}_count", "0"] == 2
    assert seen[f"{gaps}_sum", "0"] == pytest.approx(7.4)
    assert seen[f"{gaps}_count", "1"] == 0


def test_an_unknown_drift_is_left_out():
    assert ("drift", "0") not in values([Counters().to_dict() | REST | {"drift": None}])


HANGING_S = 60.0


def test_engines_that_hang_or_fail_are_left_out(monkeypatch):
    monkeypatch.setattr(route, "ANSWER_TIMEOUT_S", 0.2)

    async def hanging():
        await asyncio.sleep(HANGING_S)

    async def failing():
        raise RuntimeError("gone")

    async def refusing():
        return {"error": {"code": "engine_fault", "message": "torn"}}

    async def well():
        return {"ok": Counters().to_dict() | REST}

    class Four(Engine):
        def call_utility_each(self, name, method, body):
            assert (name, method) == ("inflight", "metrics")
            return [hanging(), failing(), refusing(), well()]

    began = time.monotonic()
    text = TestClient(served(Four())).get("/metrics").text
    assert time.monotonic() - began < HANGING_S
    ours = text[text.index("vllm:inflight_") - len("# HELP ") :]
    seen = samples(ours)
    assert seen["epoch", "3"] == 3
    assert {labels[1] for labels in seen if labels[0] == "epoch"} == {"3"}


class Slow(Engine):
    """Answers when it is let, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.let = asyncio.Event()

    def call_utility_each(self, name, method, body):
        async def answer():
            self.num_asked += 1
            await self.let.wait()
            return {"ok": Counters().to_dict() | REST}

        return [answer()]


def test_scrapes_that_come_together_ask_the_engine_once(monkeypatch):
    monkeypatch.setattr(route, "FRESH_S", 60.0)

    async def scrape():
        engine = Slow()
        scrapes = route.Scrapes(engine.engine_core)
        waiting = [asyncio.create_task(scrapes.text()) for _ in range(20)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # who goes away takes nothing from the others
        engine.let.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        texts = await asyncio.gather(*waiting[1:])
        assert engine.num_asked == 1
        assert b"vllm:inflight_epoch" in texts[0] and len(set(texts)) == 1
        assert await scrapes.text() == texts[0]
        assert engine.num_asked == 1
        scrapes._stale_at -= route.FRESH_S
        await scrapes.text()
        assert engine.num_asked == 2

    asyncio.run(scrape())


def test_the_error_of_a_failed_scrape_is_not_cached():
    async def scrape():
        engine = Slow()
        scrapes = route.Scrapes(engine.engine_core)
        engine.let = None  # it breaks what the engine is asked
        engine.call_utility_each = lambda *_: 1 / 0
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await scrapes.text()

    asyncio.run(scrape())


def test_a_pause_counts_in_the_mode_it_ends_in(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    counts = Counters()
    counts.resumed()  # nothing was paused
    counts.paused(PauseMode.IN_PLACE)
    now[0] += 2
    counts.paused(PauseMode.RETRACT)
    now[0] += 3
    counts.resumed()
    counts.resumed()
    assert counts.pause_s == {"retract": 5.0}
