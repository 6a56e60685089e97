"""The pages are true: generated tables are fresh, snippets parse, links hold."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import signatures
from tests.e2e.test_in_place_loaders import UNPLAYED
from tests.support.models import families_seen
from tests.support.models.families import FAMILIES, UNPROVED
from tests.support.models.seeing import SEEING
from tests.support.preloaded_process import run
from vllm.inflight import trainer
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES
from vllm.inflight.errors import BY_CODE, InflightError
from vllm.inflight.patch import api as doors
from vllm.inflight.update import Phase
from vllm.inflight.worker.model.kinds.quantized import PROVED, PROVED_ON_RANKS

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def snippets(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.name}#{number}", body)
        for page in PAGES
        for number, (kind, body) in enumerate(FENCE.findall(page.read_text()))
        if kind == language
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of `page`, as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", t).strip().lower().replace(" ", "-") for t in titles
    }


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if not target.startswith(("http://", "https://", "mailto:")):
                yield page, target


@pytest.mark.seconds
def test_generated_pages_are_up_to_date():
    # In a process of its own: an engine in this one may have put our methods in the
    # place of upstream's, with upstream's signatures.
    done = run("docs.generate", "--check")
    assert (done.returncode, done.stdout) == (0, ""), f"run: make docs\n{done.stderr}"


def test_the_limits_name_every_quantised_layer_that_is_let_through():
    rows = [r.split("|") for r in (DOCS / "limits.md").read_text().splitlines()]

    def told(column: int, word: str) -> set[tuple[str, str]]:
        return {
            (row[2].strip(" `"), row[3].strip(" `"))
            for row in rows
            if len(row) == 8 and word in row[column]
        }

    assert {"cpu": told(4, "yes"), "cuda": told(5, "yes")} == PROVED
    on_ranks = {"cpu": told(6, "CPU build"), "cuda": told(6, "H200")}
    assert on_ranks == PROVED_ON_RANKS


VARIANT = "mixtral_unrouted"
"""Of a family that is in the table."""


def test_there_is_a_record_of_every_family_that_is_tested():
    seen = families_seen.read()
    assert not FAMILIES.keys() & SEEING.keys(), "one would hide the other"
    known = FAMILIES | SEEING
    assert seen.keys() <= known.keys()
    tested = {name for name in known if name not in (*UNPROVED, VARIANT)}
    on_cpus = {n: runs["cpu eager"] for n, runs in seen.items() if "cpu eager" in runs}
    assert {n for n, run in on_cpus.items() if run["result"] == "equal"} == tested
    logged = {name for name, runs in seen.items() if "delta cpu eager" in runs}
    assert logged == known.keys() - {*UNPROVED}
    played = {name for name, runs in seen.items() if "host eager" in runs}
    assert played == FAMILIES.keys() - {*UNPLAYED, VARIANT}
    assert {runs["host eager"]["result"] for runs in map(seen.get, played)} == {"equal"}


@pytest.mark.parametrize("name, body", snippets("python"))
def test_python_in_the_pages_compiles(name, body):
    compile(body, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("name, body", snippets("bash"))
def test_shell_in_the_pages_parses(name, body):
    done = subprocess.run(
        ["bash", "-n"], input=body, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name, body", snippets("json"))
def test_json_in_the_pages_is_json(name, body):
    json.loads(body)


def test_the_quickstarts_command_prints_what_the_page_shows(tmp_path):
    page = (DOCS / "quickstart.md").read_text()
    command = re.search(r"^python3 -c '.*?'$", page, re.DOTALL | re.MULTILINE)[0]
    shown = next(b for kind, b in FENCE.findall(page) if kind == "json")
    answer = tmp_path / "answer.json"
    spans = {"weight_versions": json.loads(shown)}
    answer.write_text(json.dumps({"choices": [spans]}))
    command = command.replace("/tmp/answer.json", str(answer))
    printed = subprocess.run(["bash", "-c", command], stdout=-1, text=True, check=True)
    assert printed.stdout == shown


def test_links_lead_somewhere():
    broken = []
    for page, target in links():
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{page.name}: {target}")
    assert broken == []


def test_the_index_leads_to_every_page():
    listed = {target for page, target in links() if page.name == "index.md"}
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - {"index.md"} <= listed


def test_the_python_page_names_all_that_a_trainer_and_an_engine_have():
    page = (DOCS / "python.md").read_text()
    public = [getattr(trainer, name) for name in trainer.__all__]
    kinds = [each for each in public if inspect.isclass(each)]
    names = {name for kind in kinds for name in vars(kind) if name[0] != "_"}
    names |= set(trainer.__all__)
    names |= {method.__name__ for method in doors.METHODS}
    names |= inspect.signature(trainer.Publisher).parameters.keys()
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


def test_a_parameter_without_a_word_in_its_docstring_is_not_passed_over():
    def silent(told: int, untold: int) -> None:
        """Do something.

        Args:
            told: what it is.

        """

    with pytest.raises(SystemExit, match="untold"):
        signatures.described(silent)


def test_every_route_has_an_example():
    calls = " ".join(body for name, body in snippets("bash") if "http.md" in name)
    for method, path in [*ROUTES, *ROLLOUT_ROUTES]:
        plain = path.partition("/{")[0]
        verb = "curl -X POST" if method == "POST" else "curl"
        assert re.search(rf"{verb} '?localhost:8000{plain}\b", calls), (method, path)


def test_every_error_and_every_phase_is_explained():
    errors, phases = ((DOCS / n).read_text() for n in ("errors.md", "how-it-works.md"))
    assert [code for code in BY_CODE if f"`{code}`" not in errors] == ["inflight_error"]
    assert [p for p in Phase if f"`{p.value}`" not in phases] == []


def test_every_error_says_what_to_do():
    silent = [k.code for k in BY_CODE.values() if k.remedy == InflightError.remedy]
    assert silent == [InflightError.code]


def test_no_page_contains_a_placeholder():
    for page in PAGES:
        for word in ("TODO", "TBD", "FIXME", "XXX", "lorem"):
            assert word not in page.read_text(), f"{page.name}: {word}"


CODE = re.compile(
    r"(?:\b[45]\d\d|\b(?:refused|answer(?:s|ed)?|end(?:s|ed)?) (?:as|with))"
    r"\s+(?:an?\s+|[45]\d\d\s+)?`(\w+)`"
)
"""An error code, where a page says what a call is answered with."""


def test_every_error_that_a_page_names_exists():
    named = {
        (page.name, code) for page in PAGES for code in CODE.findall(page.read_text())
    }
    assert {code for _, code in named} >= {"pause_conflict", "update_in_progress"}
    assert {(page, code) for page, code in named if code not in BY_CODE} == set()


@pytest.mark.parametrize(
    "text",
    [
        "refused as `no_such`",
        "is 409\n`no_such`",
        "ends with an `no_such`",
        "answered with 503 `no_such`",
    ],
)
def test_an_error_code_is_found_in_every_form_that_pages_use(text):
    assert CODE.findall(text) == ["no_such"]
