"""The check of a live server: what is wrong with its updates, and what to do about it.

`GET /health` answers 200 as long as the engine core answers, whatever state an update
is in. This check probes the server twice, a few seconds apart, and compares the probes:
an update that has not moved in between is stuck. A probe is plain data: path →
`{"status", "body"}`, or `{"problem"}` where no answer came.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx

from vllm.inflight.cli.finding import NOT_ADOPTED, Finding, State
from vllm.inflight.connection import connect
from vllm.inflight.errors import EngineAsleep, EngineUnreachable, InflightError
from vllm.inflight.wording import size

Probe = dict[str, dict[str, Any]]
Facts = dict[str, Any]

PATHS = ("/health", "/version", "/metrics")
CONTROL = ("/weight_info", "/weight_update", "/is_paused")
ANSWER_TIMEOUT_S = 5.0
"""A server that takes longer to answer one of these requests hangs."""

RESTART = "The server's log says why; restart it."
GIVE_UP = "POST /abort_weight_update gives it up; what is served does not change."
WAITS_FOR = {
    "trainer": "Look whether its trainer lives.",
    "ranks": "Look into the server's log, and whether its trainer still sends.",
}
OBSTACLES = {
    401: ("they need a key", "Give --key, or set VLLM_INFLIGHT_ADMIN_KEY."),
    403: (
        "they do not open to this caller",
        "Give the right --key; without keys, ask from the server's own host.",
    ),
    404: (
        "there are none",
        "If the server was started with --inflight-port, ask that port. Else this vLLM "
        "runs without vLLM in-flight: `vllm-inflight doctor` there says why.",
    ),
}
ELSEWHERE = (
    "they answer on a port of their own",
    "Ask the port of --inflight-port, on the server's host unless --inflight-host says "
    "otherwise.",
)
"""Said where the server has the metrics of updates and not the control routes."""


def check_server(url: str, key: str | None, apart_s: float) -> list[Finding]:
    """Probe a server twice, `apart_s` seconds apart.

    Raises:
        ConfigError: the URL or the key is invalid.
        EngineUnreachable: no server answers at the URL.

    """
    with connect(url, key, timeout=ANSWER_TIMEOUT_S) as client:
        first = probe(client)
        if not is_updating(first):
            return diagnose(first, first, 0.0)
        time.sleep(apart_s)
        return diagnose(first, probe(client), apart_s)


def probe(client: httpx.Client) -> Probe:
    """Send every request of a check once."""
    found = {path: _get(client, path) for path in PATHS}
    if "problem" in found["/health"] and "problem" in found["/version"]:
        raise EngineUnreachable(f"{client.base_url} {found['/health']['problem']}")
    return found | {path: _get(client, path) for path in CONTROL}


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    try:
        reply = client.get(path)
    except httpx.TimeoutException:
        return {"problem": f"does not answer within {ANSWER_TIMEOUT_S:g} s"}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return {"problem": f"cannot be reached: {error}"}
    try:
        body = reply.json()
    except ValueError:
        body = reply.text
    return {"status": reply.status_code, "body": body}


def is_updating(found: Probe) -> bool:
    """Whether an update is under way; a second probe can show whether it moves."""
    return any(engine.get("active") for engine in _engines(found, "/weight_update"))


def diagnose(first: Probe, second: Probe, apart_s: float) -> list[Finding]:
    """The findings of two probes; the newer one counts."""
    findings = [_server(second), _release(second)]
    obstacles = [f for path in CONTROL if (f := _obstacle(second, path)) is not None]
    if obstacles:
        return [*findings, obstacles[0]]
    engines = _engines(second, "/weight_info")
    findings += [_versions(engines), *_staging(engines), *_extension(engines)]
    before = _engines(first, "/weight_update")
    updates = _engines(second, "/weight_update")
    if len(before) != len(updates):  # the server was restarted in between
        before, apart_s = updates, 0.0
    pauses = _engines(second, "/is_paused")
    for number, (old, new, pause) in enumerate(
        zip(before, updates, pauses, strict=True)
    ):
        which = "" if len(updates) == 1 else f" of engine {number}"
        findings.append(_update(f"update{which}", old, new, pause, apart_s))
        findings.append(_pause(f"decoding{which}", pause, _requests(second, number)))
    return findings


def _server(found: Probe) -> Finding:
    health = found["/health"]
    if "problem" in health:
        return Finding("server", f"/health {health['problem']}", State.WRONG, RESTART)
    if health["status"] != 200:
        dead = f"its engine is dead or hangs: /health says {health['status']}"
        return Finding("server", dead, State.WRONG, RESTART)
    return Finding("server", "it answers")


def _release(found: Probe) -> Finding:
    body = found["/version"].get("body")
    version = body.get("version") if isinstance(body, dict) else None
    return Finding("vLLM", str(version or "its version is not told"))


def _obstacle(found: Probe, path: str) -> Finding | None:
    reply, name = found[path], "control routes"
    if "problem" in reply:
        hung = f"{path} {reply['problem']}: the engine core hangs"
        return Finding(name, hung, State.WRONG, RESTART)
    status, body = reply["status"], reply["body"]
    if status == 200 and isinstance(body, dict):
        return None
    problem, remedy = OBSTACLES.get(status, (f"{path} says {status}", RESTART))
    if status == 404 and "vllm:inflight_" in str(found["/metrics"].get("body")):
        problem, remedy = ELSEWHERE
    return Finding(name, problem, State.WRONG, remedy)


def _versions(engines: list[Facts]) -> Finding:
    name = "weights"
    versions = [
        f"{e['weight_version']!r} (epoch {e['epoch']}, "
        f"digest {e['digest'] or 'unknown'})"
        for e in engines
    ]
    missing = {e["weights"] for e in engines} - {"live"}
    if missing:
        found = f"{' and '.join(sorted(missing))}; served last was {versions[0]}"
        return Finding(name, found, State.NOTE, EngineAsleep.remedy)
    scrubs = [e["scrub"] for e in engines if e.get("scrub")]
    different = [scrub for scrub in scrubs if scrub["result"] == "different"]
    if different:
        names = ", ".join(name for scrub in different for name in scrub["different"])
        found = f"{versions[0]}, and are not what was committed: {names}"
        return Finding(name, found, State.WRONG, "Publish a whole version.")
    if len({(e["weight_version"], e["digest"]) for e in engines}) == 1:
        return Finding(name, versions[0])
    return Finding(
        name,
        "the engines differ: " + "; ".join(f"{n}: {t}" for n, t in enumerate(versions)),
        State.WRONG,
        "Publish one version to all of them.",
    )


def _staging(engines: list[Facts]) -> Iterator[Finding]:
    """What all engines together hold for updates.

    A server of an older release does not tell.
    """
    told = [engine["staging"] for engine in engines if engine.get("staging")]
    reason = next((each["reason"] for each in told if each["reason"]), None)
    if reason is not None:
        yield Finding("staging", f"no updates in flight: {reason}", State.NOTE)
    elif told:
        on_device, on_host, buckets = (
            size(sum(each.get(key, 0) for each in told))
            for key in ("bytes", "host_bytes", "bucket_bytes")
        )
        found = f"shadow weights of {on_device}"
        if any(each["has_logs"] for each in told):
            found = f"a log of {on_device}, which goes on in up to {on_host} of host "
            found += f"memory; buckets take {buckets} more"
        # A server of an older release does not tell this.
        if num := max(each.get("unproved", 0) for each in told):
            found += (
                f"; the places of {num} tensors are not proved yet: the next update "
                "proves them before it writes, and takes longer"
            )
        yield Finding("staging", found, State.NOTE if num else State.GOOD)


def _extension(engines: list[Facts]) -> Iterator[Finding]:
    """Which calls of the worker extension are adopted, and why others are not.

    All engines of a server have the same extension. A server of an older release does
    not tell.
    """
    told = engines[0].get("worker_extension") if engines else None
    if told is None:
        return
    name, extension = "worker extension", told["name"] or "the worker's own class"
    adopted = [call for call in told["calls"] if call["why"] is None]
    others = [call for call in told["calls"] if call["why"] is not None]
    if adopted:
        frameworks = ", ".join(dict.fromkeys(call["framework"] for call in adopted))
        calls = ", ".join(call["call"] for call in adopted)
        found = f"{extension} is adopted as {frameworks}: {calls}"
    elif others:
        found = f"{extension} has known calls, and none is adopted"
    else:
        found = f"{extension} has none of the known calls"
    if others:
        whys = (f"{call['call']} is not adopted: {call['why']}" for call in others)
        found = "; ".join([found, *whys])
    state = State.GOOD if adopted and not others else State.NOTE
    yield Finding(name, found, state, None if state is State.GOOD else NOT_ADOPTED)


def _update(
    name: str, before: Facts, now: Facts, pause: Facts, apart_s: float
) -> Finding:
    active = now["active"]
    if active is None:
        return _outcome(name, now["outcomes"])
    old = before["active"]
    is_same = old is not None and old["update_id"] == active["update_id"]
    grown = _progress(active) - (_progress(old) if is_same else 0)
    phase = active["phase"]
    found = (
        f"{active['update_id']!r} is {phase} since {active['seconds']['total']:.0f} s, "
        f"with {_progress(active)} bytes; it is aborted in "
        f"{active['deadline_left_s']:.0f} s unless it is committed"
    )
    if phase != "staged":
        if grown:
            moved = f"{found}; {grown} bytes came in {apart_s:g} s"
            return Finding(name, moved, State.NOTE)
        waits_for = active["waits_for"]
        still = (
            f"{found}; nothing has moved for {active['stalled_s']:.0f} s, and it waits "
            f"for its {waits_for}"
        )
        remedy = f"{WAITS_FOR[waits_for]} {GIVE_UP}"
        return Finding(name, still, State.WRONG, remedy)
    if pause["for_commit"]:
        return Finding(name, f"{found}; waits for running requests", State.NOTE)
    if not is_same or old["phase"] != phase:
        return Finding(name, found, State.NOTE)
    remedy = f"POST /finish_weight_update commits it. {GIVE_UP}"
    return Finding(name, f"{found}; nobody commits it", State.WRONG, remedy)


def _outcome(name: str, outcomes: list[Facts]) -> Finding:
    if not outcomes:
        return Finding(name, "none yet")
    last = outcomes[0]
    outcome = f"{last['update_id']!r} was {last['phase'].replace('_', ' ')}"
    if (error := last.get("error")) is None:
        is_live = last["phase"] == "committed"
        return Finding(name, outcome, State.GOOD if is_live else State.NOTE)
    return Finding(
        name,
        f"{outcome}: {error['code']}: {error['message']}",
        State.WRONG,
        InflightError.from_dict(error).remedy,
    )


def _progress(update: Facts) -> int:
    return sum(rank.get("bytes", 0) for rank in update["ranks"])


def _pause(name: str, pause: Facts, requests: tuple[int, int]) -> Finding:
    running, waiting = requests
    load = f"{running} requests run, {waiting} wait"
    if not pause["is_paused"]:
        return Finding(name, load)
    if pause.get("absorbed"):
        absorbed = f"a pause in mode {pause['mode']!r} is absorbed; {load}"
        return Finding(name, absorbed, State.NOTE)
    load = f"{running} requests stand still, {waiting} wait"
    if pause["for_commit"]:
        return Finding(name, f"a commit waits for running requests; {load}", State.NOTE)
    owner = "nobody who gave a name" if pause["owner"] is None else pause["owner"]
    found = f"paused in mode {pause['mode']!r} by {owner}"
    if pause["lease_left_s"] is not None:
        left = f"{found}, for {pause['lease_left_s']:.0f} s unless renewed; {load}"
        return Finding(name, left, State.NOTE)
    return Finding(
        name,
        f"{found}, without a lease: it lasts until somebody continues it; {load}",
        State.WRONG,
        "POST /resume continues. A pause with lease_s ends by itself.",
    )


def _requests(found: Probe, engine: int) -> tuple[int, int]:
    """How many requests run and wait, by the metrics; 0 where they do not say it."""
    metrics = found["/metrics"]
    text = metrics.get("body") if metrics.get("status") == 200 else ""
    sums = {"running": 0.0, "waiting": 0.0}
    for sample in _samples(text if isinstance(text, str) else ""):
        state = sample.name.removeprefix("vllm:num_requests_")
        if state in sums and sample.labels.get("engine") == str(engine):
            sums[state] += sample.value
    return int(sums["running"]), int(sums["waiting"])


def _samples(text: str) -> Iterator[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        yield from family.samples


def _engines(found: Probe, path: str) -> list[Facts]:
    """The reply of each engine of a data-parallel server; empty if there is none."""
    body = found[path].get("body")
    if found[path].get("status") != 200 or not isinstance(body, dict):
        return []
    engines: list[Facts] = body.get("engines", [body])
    return engines
