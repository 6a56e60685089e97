"""Sequences of calls that harm vLLM as it is, on a server.

`with site(old, new, env={"VLLM_PLUGINS": ""}) as it: PLAYS[name](it)` plays one on vLLM
as it is, and may be that server's last.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.robustness.faults.in_process import NUM_TENSORS
from tests.robustness.faults.site import (
    DEADLINE_S,
    LEASE_S,
    NEVER_S,
    PATIENCE_S,
    Seen,
    Site,
    Stream,
)


def slow_transfer(site: Site) -> Seen:
    """A transfer takes seconds; a client asks, and lets requests go on, meanwhile."""
    stream = Stream(site, 900)
    site.pause()
    start = site.call("/start_weight_update", {})
    replies: list[Any] = []
    sender = threading.Thread(
        target=lambda: replies.append(site.send(sleep_s=6 / 25)), daemon=True
    )
    begin = time.monotonic()
    sender.start()
    time.sleep(0.5)
    asked = site.call("/is_paused")
    resumed = site.call("/resume", {})
    sender.join()
    end = time.monotonic()
    return {
        "start": start,
        "send": replies[0],
        "asked": asked,
        "resumed": resumed,
        "seconds": end - begin,
        "tokens": stream.between(begin, end),
        "finish": site.finish("new", wait_s=PATIENCE_S),
    }


def without_a_pause(site: Site) -> Seen:
    """An update is begun by a stranger, then with the key, while a request runs."""
    stream = Stream(site, 700)
    seen = {
        "read": site.stranger("/v1/models"),
        "stranger's pause": site.stranger("/pause?mode=keep&clear_cache=false", {}),
        "stranger's resume": site.stranger("/resume", {}),
        "stranger's start": site.stranger("/start_weight_update", {}),
        "start": site.call("/start_weight_update", {}, wait_s=PATIENCE_S),
    }
    stream.join(timeout=60)
    return seen | {"stream": stream.ended, "lives": site.lives()}


def caches_cleared(site: Site) -> Seen:
    """Two updates under a running request: caches are cleared, and they are not."""

    def metric(name: str) -> float:
        text = httpx.get(site.server.url + "/metrics", timeout=60).text
        lines = (line for line in text.splitlines() if line.startswith(name + "{"))
        return sum(float(line.split()[-1]) for line in lines)

    def update(clear: str) -> Seen:
        before = metric("vllm:num_preemptions_total")
        stream = Stream(site, 300)
        site.call(f"/pause?mode=keep&clear_cache={clear}", {})
        replies = [site.call("/start_weight_update", {}), site.send()]
        replies.append(site.finish(f"cleared: {clear}"))
        site.call("/resume", {})
        stream.join(timeout=60)
        return {
            "update": [reply["status"] for reply in replies],
            "stream": stream.ended,
            "preempted": metric("vllm:num_preemptions_total") - before,
        }

    cleared = update("true")
    site.tokens()
    kept = update("false")
    before = metric("vllm:prefix_cache_hits_total")
    site.tokens()
    hits = metric("vllm:prefix_cache_hits_total") - before
    return {"cleared": cleared, "kept": kept, "hits": hits}


def renamed(site: Site) -> Seen:
    """Another label is given to what is served while a request runs."""
    stream = Stream(site, 300)
    site.pause()  # so that it does not end before
    before = site.call("/weight_info")["body"]
    rename = site.call("/update_weight_version", {"new_version": "another"})
    after = site.call("/weight_info")["body"]
    site.call("/resume", {})
    stream.join(timeout=60)
    spans = stream.last and stream.last["weight_versions"]
    return {"before": before, "rename": rename, "after": after, "spans": spans}


def controller_gone(site: Site) -> Seen:
    """Who has paused the engine is not heard of again."""
    pause = site.pause()
    tokens = site.tokens(wait_s=LEASE_S + PATIENCE_S)
    paused = site.call("/is_paused")
    site.call("/resume", {})
    return {"pause": pause, "tokens": tokens, "paused": paused["body"]}


def lost_reply(site: Site) -> Seen:
    """A client loses the reply of its transfer, and asks what has become of it."""
    site.pause()
    start = site.call("/start_weight_update", {"update_id": "lost"})
    lost = site.send(sleep_s=0.1, wait_s=0.5)
    asked = site.call("/weight_update/lost")
    again = site.call("/start_weight_update", {"update_id": "lost"})
    given_up = site.call("/abort_weight_update", {"update_id": "lost"})
    site.call("/resume", {})
    return {
        "start": start,
        "send": lost,
        "asked": asked,
        "start again": again,
        "given up": given_up,
        "lives": site.lives(),
    }


def wrong_calls(site: Site) -> Seen:
    """Calls that are refused for five different reasons."""
    early = site.send(), site.finish("nothing")
    start = site.call("/start_weight_update", {})
    twice = site.call("/start_weight_update", {"update_id": "another"})
    unknown = site.send(rename={"model.norm.weight": "model.norm.wait"})
    site.call("/abort_weight_update", {})
    again = site.call("/start_weight_update", {})
    short = site.send(reshape="lm_head.weight")
    end = site.finish("short")
    return {
        "started": [start["status"], again["status"]],
        "sent before it was begun": early[0],
        "finished before it was begun": early[1],
        "begun twice": twice,
        "a name that is not the model's": unknown,
        "a shape that is not the model's": short if short["status"] != 200 else end,
    }


def never_ends(site: Site) -> Seen:
    """A trainer dies in the middle of its transfer; then others call."""
    before = site.tokens()
    site.pause()
    start = site.call("/start_weight_update", {"deadline_s": DEADLINE_S})
    return {
        "before": before,
        "start": start,
        "send": site.send(sleep_s=NEVER_S, wait_s=PATIENCE_S),
        "paused": site.call("/is_paused", wait_s=PATIENCE_S),
        "resume": site.call("/resume", {}, wait_s=PATIENCE_S),
        "tokens": site.tokens(wait_s=PATIENCE_S),
        "health": site.call("/health"),
        "status": site.call("/weight_update"),
    }


def torn_engines(site: Site) -> Seen:
    """One of two engines fails; the trainer starts again and finishes."""
    before = site.tokens_of_each()
    site.pause()
    with tempfile.TemporaryDirectory() as folder:
        first = str(Path(folder) / "first")
        calls = {
            "start": site.call("/start_weight_update", {}),
            "send": site.send(fail_after=NUM_TENSORS, fail_first=first),
            "start again": site.call("/start_weight_update", {}),
            "finish": site.finish("torn"),
        }
    site.call("/resume", {})
    seen = calls | {
        "before": before,
        "label": site.call("/weight_info")["body"]["weight_version"],
        "after": site.tokens_of_each(),
    }
    site.pause()
    site.call("/start_weight_update", {})
    site.send()
    seen["update"] = site.finish("new")
    site.call("/resume", {})
    return seen | {"new": site.tokens_of_each()}


PLAYS: dict[str, Callable[[Site], Seen]] = {
    play.__name__: play
    for play in (
        caches_cleared,
        renamed,
        controller_gone,
        slow_transfer,
        without_a_pause,
        lost_reply,
        wrong_calls,
        never_ends,
        torn_engines,
    )
}
CHAINS = (
    ("caches_cleared", "renamed", "controller_gone", "slow_transfer"),
    ("without_a_pause",),
    ("lost_reply",),
    ("wrong_calls",),
    ("never_ends",),
    ("torn_engines",),
)
"""What one server of vLLM as it is lives through: it does not survive the last."""
TWO_ENGINES = "torn_engines"


def server_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and environment of a server that is to live through these."""
    if TWO_ENGINES not in names:
        return (), {}
    return ("--data-parallel-size", "2"), {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
