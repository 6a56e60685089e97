"""The subcommands that ask a server: what they send, print and exit with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trainers.fake_engine import FROM_DISK, PAUSE, StandIn
from vllm.inflight.cli.main import main
from vllm.inflight.errors import Forbidden, UpdateBusy


@pytest.fixture
def engine():
    with StandIn() as stand_in:
        yield stand_in


@pytest.fixture
def run(engine, capsys):
    """`run(*words)`: exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        command, *rest = words
        code = main([command, "--url", engine.url, *rest])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_status_shows_versions_updates_and_the_pause(engine, run):
    engine.commit_elsewhere("v1")
    engine.begin_elsewhere()
    run("pause", "--mode", "retract", "--lease-s", "60", "--owner", "me")
    code, out, _ = run("status")
    assert code == 0
    assert "live: 'v1', epoch 1, digest unknown" in out
    assert "rollback target: 'default'" in out
    assert out.count("update 'elsewhere': ") == 1
    assert "decoding is paused in mode retract by 'me', for 60 s unless renewed" in out
    told = json.loads(run("status", "--json")[1])
    assert told.keys() == {"weights", "updates", "pause"}
    one = json.loads(run("status", "--update-id", "elsewhere", "--json")[1])
    assert one["update_id"] == "elsewhere"
    assert "'elsewhere'" in run("status", "--update-id", "elsewhere")[1]


def test_publish_sends_a_path_of_the_server(engine, run):
    code, out, _ = run("publish", "/models/x", "--version", "v1", "--mode", "retract")
    assert code == 0 and "live: 'v1', epoch 1" in out
    (body,) = engine.bodies(FROM_DISK)
    body.pop("update_id")
    told = {"path": "/models/x", "weight_version": "v1", "mode": "retract"}
    assert body == told


def test_rollback_pause_continue_and_abort_commands_call_the_server(engine, run):
    engine.commit_elsewhere("v1")
    assert run("rollback", "--to-version", "default")[:1] == (0,)
    assert engine.version["weight_version"] == "default"
    assert json.loads(run("pause", "--json")[1])["mode"] == "in_place"
    assert engine.bodies(PAUSE)[-1]["lease_s"] is None
    assert run("continue")[:2] == (0, "decoding is not paused\n")
    engine.begin_elsewhere()
    assert run("abort")[:2] == (0, "update 'elsewhere': aborted\n")


def test_a_rejection_by_the_server_is_printed_with_its_remedy(engine, run):
    engine.faults[FROM_DISK] = [UpdateBusy("another\x1b[2J")] * 2
    code, out, err = run("publish", "/x")
    assert (code, out) == (1, "")
    assert "update_in_progress" in err and UpdateBusy.remedy in err
    assert "\x1b" not in err
    code, out, _ = run("publish", "/x", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "update_in_progress")


def test_the_exit_code_distinguishes_an_unreachable_server_from_a_rejection(
    engine, run, capsys
):
    engine.faults["/weight_update"] = [Forbidden("wrong key")]
    assert run("status", "--api-key", "wrong")[0] == 1
    assert engine.key == "Bearer wrong"
    assert main(["status", "--url", "ftp://localhost"]) == 2
    gone = ["status", "--url", "127.0.0.1:9", "--timeout-s", "0.3", "--json"]
    capsys.readouterr()
    assert main(gone) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "engine_unreachable"
    with pytest.raises(SystemExit) as raised:
        main(["pause", "--mode", "nonsense"])
    assert raised.value.code == 2


@pytest.mark.parametrize("words", [["status"], ["doctor"]])
def test_every_command_takes_an_address_without_a_scheme_and_the_key_by_either_name(
    engine, capsys, words
):
    engine.faults["/weight_update"] = [Forbidden("wrong key")]
    url = engine.url.removeprefix("http://")
    assert main([*words, "--url", url, "--api-key", "wrong"]) == 1
    assert engine.key == "Bearer wrong"


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
def test_a_timeout_is_not_negative(capsys, seconds):
    with pytest.raises(SystemExit):
        main(["status", "--timeout-s", seconds])
    assert "--timeout-s" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_command_says_what_it_waits_for():
    command = Path(sys.executable).with_name("vllm-inflight")
    gone = [command, "status", "--url", "127.0.0.1:9", "--timeout-s", "3"]
    done = subprocess.run(gone, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    waits, *_, error, _ = done.stderr.splitlines()
    assert "http://127.0.0.1:9: no answer to GET /weight_update yet" in waits
    assert error.startswith("engine_unreachable: ")
