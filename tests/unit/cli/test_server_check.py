"""What two looks at a server amount to; the looks are plain data."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest

from vllm.inflight.cli import main
from vllm.inflight.cli.finding import Finding, State
from vllm.inflight.cli.server_check import Probe, diagnose, probe
from vllm.inflight.errors import EngineUnreachable, WeightsMismatch

METRICS = """
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 50.0
"""
RUNNING = {
    "is_paused": False,
    "mode": None,
    "absorbed": False,
    "is_draining": False,
    "for_commit": False,
    "owner": None,
    "lease_left_s": None,
    "leases_expired": 0,
}
PAUSED = RUNNING | {"is_paused": True, "mode": "in_place"}
SERVED = {"weight_version": "v1", "epoch": 1, "digest": "ab", "weights": "live"}
STAGING = {
    "update_id": "u",
    "phase": "staging",
    "seconds": {"total": 12.3},
    "deadline_left_s": 87.7,
    "stalled_s": 9.6,
    "waits_for": "trainer",
    "ranks": [{"bytes": 400}, {"bytes": 300}],
}


def ok(body: Any) -> dict[str, Any]:
    return {"status": 200, "body": body}


def healthy(*, num_engines: int = 1, **parts: dict[str, Any]) -> Probe:
    """A look at a server with nothing wrong, but for `parts` of each engine."""
    facts = {
        "weight_info": SERVED,
        "weight_update": {"active": None, "outcomes": []},
        "is_paused": RUNNING,
    } | parts
    engines = {
        f"/{path}": [copy.deepcopy(fact)] * num_engines for path, fact in facts.items()
    }
    return {
        "/health": ok(""),
        "/version": ok({"version": "0.32.0"}),
        "/metrics": ok(METRICS),
        **{path: ok(each[0] | {"engines": each}) for path, each in engines.items()},
    }


def found(first: Probe, second: Probe | None = None) -> dict[str, Finding]:
    return {f.name: f for f in diagnose(first, second or first, 2.0)}


def wrong(findings: dict[str, Finding]) -> list[str]:
    return [name for name, f in findings.items() if f.state is State.WRONG]


def updating(**changes: Any) -> Probe:
    return healthy(weight_update={"active": STAGING | changes, "outcomes": []})


def test_a_healthy_server_has_only_good_findings():
    findings = found(healthy())
    assert {f.state for f in findings.values()} == {State.GOOD}
    assert findings["decoding"].found == "2 requests run, 3 wait"


def test_a_dead_engine_is_reported_from_the_health_route():
    dead = healthy() | {"/health": {"status": 503, "body": ""}}
    assert "its engine is dead or hangs" in found(dead)["server"].found


def test_a_hanging_engine_core_is_reported_although_health_returns_200():
    hung = healthy() | {"/weight_info": {"problem": "does not answer within 5 s"}}
    findings = found(hung)
    assert wrong(findings) == ["control routes"]
    assert "the engine core hangs" in findings["control routes"].found


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "--key"), (403, "right --key"), (404, "doctor")]
)
def test_rejecting_control_routes_are_reported_with_the_remedy(status, remedy):
    closed = healthy() | {"/weight_info": {"status": status, "body": {}}}
    finding = found(closed)["control routes"]
    assert finding.state is State.WRONG
    assert remedy in (finding.remedy or "")


def test_control_routes_on_another_port_are_distinguished_from_missing_ones():
    none = healthy() | {"/weight_info": {"status": 404, "body": {}}}
    elsewhere = none | {"/metrics": ok('vllm:inflight_epoch{engine="0"} 3.0')}
    for closed, what in ((none, "there are none"), (elsewhere, "of their own")):
        finding = found(closed)["control routes"]
        assert what in finding.found
        assert "--inflight-port" in (finding.remedy or "")
    assert "without vLLM in-flight" not in (finding.remedy or "")


def test_an_update_in_progress_is_a_note():
    more = [{"bytes": 900}, {"bytes": 300}]
    finding = found(updating(), updating(ranks=more))["update"]
    assert finding.state is State.NOTE
    assert "500 bytes came in 2 s" in finding.found


def test_an_update_that_stands_still_is_wrong_and_says_how_long_and_until_when():
    finding = found(updating())["update"]
    assert finding.state is State.WRONG
    assert finding.found == (
        "'u' is staging since 12 s, with 700 bytes; it is aborted in 88 s unless it is "
        "committed; nothing has moved for 10 s, and it waits for its trainer"
    )
    assert "whether its trainer lives" in (finding.remedy or "")
    assert "/abort_weight_update" in (finding.remedy or "")


def test_an_update_stalled_by_its_ranks_is_distinguished_from_one_without_a_trainer():
    finding = found(updating(waits_for="ranks"))["update"]
    assert "it waits for its ranks" in finding.found
    assert "server's log" in (finding.remedy or "")


def test_an_update_that_replaced_the_one_seen_before_does_not_count_as_stalled():
    assert found(updating(update_id="old"), updating())["update"].state is State.NOTE


def test_a_staged_update_that_no_client_commits_is_wrong():
    finding = found(updating(phase="staged"))["update"]
    assert finding.state is State.WRONG
    assert "/finish_weight_update" in (finding.remedy or "")
    assert found(updating(), updating(phase="staged"))["update"].state is State.NOTE


def test_a_commit_that_waits_for_requests_is_a_note():
    waits = healthy(
        weight_update={"active": STAGING | {"phase": "staged"}, "outcomes": []},
        is_paused=PAUSED | {"for_commit": True, "mode": "wait"},
    )
    findings = found(waits)
    assert findings["update"].state is findings["decoding"].state is State.NOTE


def test_a_failed_update_comes_with_its_reason_and_remedy():
    error = {"code": "weights_mismatch", "message": "missing: a"}
    last = {"update_id": "u", "phase": "aborted", "error": error}
    before = {"update_id": "t", "phase": "committed"}
    failed = healthy(weight_update={"active": None, "outcomes": [last, before]})
    finding = found(failed)["update"]
    assert finding.state is State.WRONG
    assert finding.found == "'u' was aborted: weights_mismatch: missing: a"
    assert finding.remedy == WeightsMismatch.remedy
    error["remedy"] = "Send a."
    failed = healthy(weight_update={"active": None, "outcomes": [last, before]})
    assert found(failed)["update"].remedy == "Send a."


@pytest.mark.parametrize(
    ("phase", "state"),
    [("committed", State.GOOD), ("rolled_back", State.NOTE), ("aborted", State.NOTE)],
)
def test_an_update_that_ended_on_request_is_not_wrong(phase, state):
    outcomes = [{"update_id": "u", "phase": phase}]
    finding = found(healthy(weight_update={"active": None, "outcomes": outcomes}))
    assert finding["update"].state is state


def test_a_pause_without_a_lease_is_wrong_and_reported_with_owner_and_request_counts():
    finding = found(healthy(is_paused=PAUSED | {"owner": "rl-0"}))["decoding"]
    assert finding.state is State.WRONG
    assert "by rl-0, without a lease" in finding.found
    assert "2 requests stand still, 3 wait" in finding.found
    anonymous = found(healthy(is_paused=PAUSED))["decoding"]
    assert "by nobody who gave a name" in anonymous.found


def test_an_absorbed_pause_is_a_note_and_requests_run():
    absorbed = healthy(is_paused=PAUSED | {"absorbed": True})
    finding = found(absorbed)["decoding"]
    assert finding.state is State.NOTE
    assert "is absorbed; 2 requests run, 3 wait" in finding.found


def test_a_pause_with_a_lease_is_a_note():
    leased = healthy(is_paused=PAUSED | {"owner": "rl-0", "lease_left_s": 9.0})
    finding = found(leased)["decoding"]
    assert finding.state is State.NOTE
    assert "for 9 s unless renewed" in finding.found


def test_engines_that_serve_different_versions_are_reported():
    two = healthy(num_engines=2)
    assert wrong(found(two)) == []
    served = [SERVED, SERVED | {"weight_version": "v2", "digest": "cd"}]
    two["/weight_info"] = ok(SERVED | {"engines": served})
    findings = found(two)
    assert wrong(findings) == ["weights"]
    assert "0: 'v1'" in findings["weights"].found
    assert "1: 'v2'" in findings["weights"].found


def test_an_unknown_digest_is_reported_in_words():
    first = SERVED | {"weight_version": "default", "epoch": 0, "digest": None}
    told = found(healthy(weight_info=first))["weights"].found
    assert told == "'default' (epoch 0, digest unknown)"


def test_weights_that_differ_in_a_scrub_are_reported():
    scrub = {"result": "different", "different": ["model.norm.weight"]}
    findings = found(healthy(weight_info=SERVED | {"scrub": scrub}))
    assert wrong(findings) == ["weights"]
    assert "not what was committed: model.norm.weight" in findings["weights"].found
    scrub = {"result": "equal", "different": []}
    assert wrong(found(healthy(weight_info=SERVED | {"scrub": scrub}))) == []


PUSH = {"framework": "mine", "call": "push(folder)", "role": "version", "why": None}
PATCH = PUSH | {
    "call": "patch(delta)",
    "why": "it writes into the live model by itself",
}


@pytest.mark.parametrize(
    ("calls", "state", "words"),
    [
        ([PUSH], State.GOOD, "Mine is adopted as mine: push(folder)"),
        (
            [PUSH, PATCH],
            State.NOTE,
            "push(folder); patch(delta) is not adopted: it writes into the live",
        ),
        ([PATCH], State.NOTE, "Mine has known calls, and none is adopted; patch"),
        ([], State.NOTE, "Mine has none of the known calls"),
    ],
)
def test_the_doctor_says_which_calls_of_a_running_extension_are_adopted(
    calls: list[dict[str, Any]], state: State, words: str
) -> None:
    served = SERVED | {"worker_extension": {"name": "Mine", "calls": calls}}
    finding = found(healthy(num_engines=2, weight_info=served))["worker extension"]
    assert finding.state is state and words in finding.found
    assert (finding.remedy is None) == (state is State.GOOD)


@pytest.mark.parametrize(
    ("has_logs", "reason", "told"),
    [
        (False, None, "shadow weights of 6.00 GiB"),
        (
            True,
            None,
            "a log of 6.00 GiB, which goes on in up to 2.00 GiB of host memory; "
            "buckets take 1.00 GiB more",
        ),
        (True, "it packs", "no updates in flight: it packs"),
    ],
)
def test_what_engines_hold_for_updates_is_told_in_all(
    has_logs: bool, reason: str | None, told: str
):
    sizes = {"bytes": 3 << 30, "host_bytes": 1 << 30, "bucket_bytes": 1 << 29}
    staging = sizes | {"has_logs": has_logs, "reason": reason}
    findings = found(healthy(num_engines=2, weight_info=SERVED | {"staging": staging}))
    assert findings["staging"].found.startswith(told)
    assert wrong(findings) == []


def test_places_that_are_not_proved_yet_are_a_note():
    sizes = {"bytes": 3 << 30, "host_bytes": 0, "has_logs": False, "reason": None}
    staging = {"staging": sizes | {"unproved": 7}}
    finding = found(healthy(num_engines=2, weight_info=SERVED | staging))["staging"]
    assert finding.state is State.NOTE
    assert "the places of 7 tensors are not proved yet" in finding.found


def test_without_a_worker_extension_there_is_no_finding_about_one():
    assert "worker extension" not in found(healthy())
    served = SERVED | {"worker_extension": None}
    assert "worker extension" not in found(healthy(weight_info=served))


def test_sleeping_weights_are_a_note_that_says_how_to_wake_them():
    finding = found(healthy(weight_info=SERVED | {"weights": "asleep"}))["weights"]
    assert finding.state is State.NOTE
    assert finding.found.startswith("asleep; served last was 'v1'")
    assert "Wake the engine up" in finding.remedy


def test_findings_name_the_engine_that_they_concern():
    two = healthy(num_engines=2)
    two["/is_paused"] = ok(RUNNING | {"engines": [RUNNING, PAUSED]})
    findings = found(two)
    assert wrong(findings) == ["decoding of engine 1"]
    assert "50 wait" in findings["decoding of engine 1"].found


def test_a_server_that_came_back_with_more_engines_is_judged_as_it_is_now():
    findings = found(updating(), healthy(num_engines=2))
    assert wrong(findings) == []
    assert "update of engine 1" in findings


def test_an_address_without_a_server_exits_with_2_and_no_traceback(capsys):
    url = "http://127.0.0.1:1"
    with httpx.Client(base_url=url) as client, pytest.raises(EngineUnreachable):
        probe(client)
    assert main.main(["doctor", "--url", url]) == 2
    told = capsys.readouterr().err
    assert "cannot be reached" in told
    assert "whether a server runs there" in told


def test_an_invalid_server_url_is_reported_on_one_line(capsys):
    assert main.main(["doctor", "--url", "ftp://localhost"]) == 2
    told = "a server's URL begins with http://, got 'ftp://localhost'.\n"
    assert capsys.readouterr().err == told


def test_a_missing_scheme_is_http(capsys):
    assert main.main(["doctor", "--url", "127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err


KEYS_THAT_CANNOT_BE = ("s3crét", "s3\ncret", " s3cret", "s3cret ", "s3cret\t")


@pytest.mark.parametrize(
    "words",
    [
        ["http://[::1"],
        ["http://127.0.0.1:70000"],
        ["ftp://localhost"],
        ["http://a..b"],
        [f"http://{'a' * 64}.b"],
        ["http://xn--zz"],
        ["http://"],
        *(["http://127.0.0.1:1", "--key", key] for key in KEYS_THAT_CANNOT_BE),
    ],
)
def test_an_invalid_url_or_key_exits_with_2_and_no_traceback(capsys, words):
    assert main.main(["doctor", "--url", *words]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and not told.out
    assert "cret" not in told.err
    assert ("the key has" in told.err) == ("--key" in words)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e30", "soon"])
def test_a_wait_has_to_be_positive_and_finite(capsys, seconds):
    with pytest.raises(SystemExit) as leaving:
        main.main(["doctor", "--url", "http://127.0.0.1:1", "--watch", seconds])
    assert leaving.value.code == 2
    assert "--watch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "reply",
    [
        {"status": 404, "body": {"detail": "Not Found"}},
        {"status": 404, "body": "404 page not found"},
        {"status": 502, "body": "<html>" + "bad gateway " * 99},
        {"problem": "does not answer within 5 s"},
        ok(["0.32.0"]),
    ],
    ids=["an object", "a line", "a page", "none", "a list"],
)
def test_a_server_that_does_not_report_its_version_causes_no_traceback(reply):
    other = healthy() | {"/version": reply, "/metrics": reply}
    findings = found(other)
    assert findings["vLLM"].found == "its version is not told"
    assert findings["decoding"].found == "0 requests run, 0 wait"
