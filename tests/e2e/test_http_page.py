"""Every call of docs/http.md is answered with the fields that the page shows, and every
command of docs/runbook.md and docs/quickstart.md does what it says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines.torch_trainer import training
from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.api.server.metrics import FRESH_S
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RUNBOOK, QUICKSTART = (
    DOCS / f"{n}.md" for n in ("http", "runbook", "quickstart")
)
BIN = Path(sys.executable).parent
EXAMPLE = re.compile(r"```bash\n(curl.*?)```\n\n```json\n(.*?)```", re.DOTALL)
BACKEND = ("--weight-transfer-config", '{"backend": "local"}')


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[..., Path], tmp_path_factory: Any) -> Path:
    """`/models` of the page."""
    models = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("qwen", "qwen-step-100", "qwen-step-200")):
        (models / name).symlink_to(checkpoint(seed))
    return models


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Server]:
    extension = "--worker-extension-cls", "tests.support.engines.user_extension.Writing"
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # for `/collective_rpc`
    with Server(folders / "qwen", *BACKEND, *extension, env=env) as running:
        yield running


def shape(value: Any) -> Any:
    """Keys and types of a reply; of a list, those of its first entry."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


@pytest.fixture
def trainers(folders: Path) -> Iterator[dict[str, str]]:
    """Those that the page's groups are opened by: port of the page → their own."""
    with training("weight_update_group") as first, training("actor") as second:
        for trainer in (first, second):
            trainer.begin(folders / "qwen-step-200", ["model.norm.weight"])
        yield {"51216": str(first.port), "51217": str(second.port)}


def test_every_example_gets_the_reply_on_the_page(
    server: Server, folders: Path, trainers: dict[str, str]
):
    examples = EXAMPLE.findall(PAGE.read_text())
    assert len(examples) >= len(ROUTES)
    for commands, expected in examples:
        told = commands.replace("localhost:8000", server.url)
        for port, own in trainers.items():
            told = told.replace(port, own)
        told = told.replace("/models/", f"{folders}/")
        done = subprocess.run(
            ["bash", "-ec", told.replace("curl ", "curl -sS -w '\\n' ")],
            capture_output=True,
            text=True,
            check=True,
        )
        reply = json.loads(done.stdout.splitlines()[-1])
        assert shape(reply) == shape(json.loads(expected)), commands


# ------------------------------------------------------------------- the runbook
Said = list[tuple[int, str]]
"""Exit status and output of every block of commands."""


def nothing(server: Server, folders: Path) -> None:
    """All is well."""


def finds_nothing(server: Server, said: Said) -> None:
    assert "Nothing is wrong" in said[0][1]


def stuck(server: Server, folders: Path) -> None:
    server.post("/start_weight_update")

    def waits_for() -> str:
        status = server.client.get("/weight_update").json()
        return str(status["active"]["waits_for"])

    until(lambda: waits_for() == "trainer")


def was_given_up(server: Server, said: Said) -> None:
    (_, seen), (_, aborted) = said
    assert json.loads(seen)["active"]["waits_for"] == "trainer"
    assert json.loads(aborted)["phase"] == "aborted"


def refused(server: Server, folders: Path) -> None:
    server.post("/update_weights_from_disk", {"path": "/models/nothing"})


def is_explained(server: Server, said: Said) -> None:
    seen, _ = said[0][1].splitlines()
    assert json.loads(seen)["outcomes"][0]["error"]["code"] == "malformed"


def published(server: Server, folders: Path) -> None:
    server.post("/update_weights_from_disk", {"path": str(folders / "qwen-step-200")})


def is_good_again(server: Server, said: Said) -> None:
    (_, back), (_, again) = said
    rolled_back, info = map(json.loads, back.splitlines())
    assert rolled_back["epoch"] == info["epoch"]
    assert json.loads(again)["weight_version"] == "step-100-again"


def is_ready_for_another(server: Server, said: Said) -> None:
    assert json.loads(said[0][1])["phase"] == "aborted"
    base = json.loads(said[1][1])["weight_version"]
    begun = server.post("/start_weight_update", {"base_version": base})
    assert begun["phase"] == "staging"
    server.post("/abort_weight_update")


def is_loaded(server: Server, said: Said) -> None:
    assert said[0][1].startswith("HTTP/1.1 200")
    assert json.loads(said[1][1])["weight_version"] == "step-200"


def loading(server: Server, folders: Path) -> None:
    server.post("/collective_rpc", {"method": "tests_start_load"})
    health = partial(server.client.get, "/health")
    assert health().status_code == 200
    # An engine that is slow to answer is not waited for here.
    until(lambda: b"tests_start_load" in health().content)
    assert "tests_start_load" in health().json()["weights_detail"]


def decodes_again(server: Server, said: Said) -> None:
    (_, seen), (_, aborted) = said
    assert json.loads(seen)["weights"] == "loading"
    assert "abort_weight_update" in json.loads(seen)["weights_detail"]
    assert json.loads(aborted)["phase"] == "aborted"
    assert server.client.get("/weight_info").json()["weights"] == "live"
    until(lambda: server.client.get("/health").content == b"")


def paused(server: Server, folders: Path) -> None:
    server.post("/pause_generation", {"mode": "in_place", "owner": "gone"})


def goes_on(server: Server, said: Said) -> None:
    before, after = map(json.loads, said[0][1].splitlines())
    assert (before["is_paused"], after["paused"]) == (True, False)


def is_whole_again(server: Server, said: Said) -> None:
    (_, compared), (_, published) = said
    assert json.loads(compared)["result"] == "equal"
    assert json.loads(published)["weight_version"] == "step-100"


def is_level(server: Server, said: Said) -> None:
    assert json.loads(said[1][1])["weight_version"] == "step-100"


SCENES: dict[str, tuple[Any, Any]] = {
    "Runbook": (published, finds_nothing),
    "An update is stuck": (stuck, was_given_up),
    "An update was refused": (refused, is_explained),
    "New weights are bad": (published, is_good_again),
    "A trainer is lost": (stuck, is_ready_for_another),
    "An engine or a rank is lost": (nothing, is_loaded),
    "Nothing is decoded for want of weights": (loading, decodes_again),
    "A controller is gone": (paused, goes_on),
    "What is served is not what was committed": (published, is_whole_again),
    "Engines serve different versions": (nothing, is_level),
}
"""Sections of the runbook: what goes wrong, and what its commands have to do."""

SECTION = re.compile(r"^##? (.*?)$(.*?)(?=^##? |\Z)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def test_the_commands_of_the_runbook_do_what_it_says(
    server: Server, folders: Path
) -> None:
    sections = dict(SECTION.findall(RUNBOOK.read_text()))
    assert list(sections) == list(SCENES)
    for title, text in sections.items():
        begin, check = SCENES[title]
        begin(server, folders)
        said = [play(server, folders, block) for block in BLOCK.findall(text)]
        assert [status for status, _ in said] == [0] * len(said), (title, said)
        check(server, said)


def test_the_commands_of_the_quickstart_do_what_it_says(
    server: Server, folders: Path, tmp_path: Path
) -> None:
    server.post("/update_weights_from_disk", {"path": str(folders / "qwen")})
    text = QUICKSTART.read_text().replace("/tmp/answer.json", f"{tmp_path}/answer.json")
    sections = dict(
        SECTION.findall(text.replace("/tmp/tiny-100", "/models/qwen-step-100"))
    )
    blocks = {
        title: BLOCK.findall(sections[title])
        for title in ("Replace the weights", "Roll back", "Pause")
    }
    blocks["Watch"] = BLOCK.findall(sections["Watch, and find out what is wrong"])
    said = {}
    for title, (commands,) in blocks.items():
        status, said[title] = play(server, folders, commands)
        assert status == 0, said
    committed, spans = replies(said["Replace the weights"])
    assert committed["weight_version"] == "step-100"
    starts_and_ends = [(s["start"], s["end"]) for s in spans]
    assert starts_and_ends[0][0] == 0 < starts_and_ends[-1][1]
    info, back = replies(said["Roll back"])
    assert back["weight_version"] == info["previous"]["weight_version"]
    assert back["epoch"] == info["epoch"] + 1
    paused, asked, going = replies(said["Pause"])
    assert (paused["paused"], asked["is_paused"], going["paused"]) == (
        True,
        True,
        False,
    )
    assert "vllm:inflight_rollbacks_total" in said["Watch"]
    assert "Nothing is wrong" in said["Watch"]


def test_a_delta_made_by_hand_as_the_page_says_is_committed(
    server: Server, folders: Path
) -> None:
    section = (DOCS / "deltas.md").read_text().split("\n## By hand\n")[1]
    blocks = re.findall(
        r"^```python\n(.*?)^```", section.split("\n## ")[0], re.DOTALL | re.MULTILINE
    )
    old = load_file(folders / "qwen" / "model.safetensors")
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["model.norm.weight"][3] += 0.5
    made: dict[str, Any] = {"old": old, "new": new}
    code = "".join(blocks).replace("http://127.0.0.1:8000", server.url)
    server.post("/update_weights_from_disk", {"path": str(folders / "qwen")})
    exec(code, made)
    # Without a manifest no copy of the tensors is kept on the CPU build.
    error = made["reply"].json()["error"]
    assert error["code"] == "delta_unsupported"
    assert "manifest that has the digest of each tensor" in error["remedy"]
    with Publisher(server.url, old, delta="off") as publisher:
        publisher.publish("step-100")
    exec(code, made)
    reply = made["reply"].json()
    assert reply.get("weight_version") == "step-101", reply
    whole = folders / "whole.safetensors"
    save_file(new, whole)
    again = server.post("/update_weights_from_disk", {"path": str(whole)})
    assert again["digest"] == reply["digest"]


def replies(text: str) -> list[Any]:
    """The JSON values that `text` is, one behind the other."""
    values = []
    while text := text.lstrip():
        value, end = json.JSONDecoder().raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def play(server: Server, folders: Path, commands: str) -> tuple[int, str]:
    """One block, as an operator would type it."""
    told = commands.replace("localhost:8000", server.url.removeprefix("http://"))
    told = told.replace("/models/", f"{folders}/")
    told = told.replace("curl ", "curl -sS --fail-with-body -w '\\n' ")
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", told],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    return done.returncode, done.stdout.strip() + done.stderr


def test_metrics_report_updates_beside_upstreams_metrics(
    server: Server, folders: Path
) -> None:
    def read() -> dict[str, float]:
        texts = [""]

        def is_whole() -> bool:
            """Whether a scrape has the engine, which is left out if it is slow."""
            texts[0] = str(server.client.get("/metrics").text)
            return "vllm:inflight_epoch{" in texts[0]

        until(is_whole)
        lines = texts[0].splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    path = str(folders / "qwen-step-200")
    before = read()
    server.post("/update_weights_from_disk", {"path": path})
    server.post("/rollback_weights")
    server.post("/pause_generation", {"mode": "retract"})
    server.post("/continue_generation")
    time.sleep(FRESH_S)  # the server may tell an answer of before for so long
    after = read()
    committed = 'vllm:inflight_updates_total{engine="0",outcome="committed"}'
    assert after[committed] == before.get(committed, 0) + 1
    assert after['vllm:inflight_rollbacks_total{engine="0"}'] >= 1
    assert after['vllm:inflight_pause_seconds_total{engine="0",mode="retract"}'] > 0
    gaps = 'vllm:inflight_commit_gap_milliseconds_count{engine="0"}'
    assert after[gaps] == before[gaps] + 2
    assert after['vllm:inflight_staged_bytes_total{engine="0"}'] > 0
    assert any(name.startswith("vllm:num_requests_running") for name in after)
