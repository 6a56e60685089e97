"""The audit finds each kind of change in vLLM that would break this package."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from inspect import signature
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.releases import checks, type_errors
from tests.releases.checks import ABSENT, BREAKS, DIFFERS, FITS, Finding, misfit
from tests.releases.records import Field, RestsOn
from tests.releases.release import Release, functions_of
from tests.unit.releases.packages import release
from vllm.inflight.patch.records.record import Attribute, Override, Patch, Private
from vllm.inflight.releases.table import ADAPTERS, PLACES, SIGNATURES

_CORE = "vllm.engine:Core"
FACTS: dict[str, Any] = {"why": "a test", "remove_when": "never"}

BEFORE = {
    "vllm.engine": """
        import functools
        from abc import ABC, abstractmethod
        from dataclasses import dataclass

        class Core:
            def __init__(self):
                self._label = "v1"

            def step(self, budget): return budget

        @dataclass
        class Meta:
            name: str

        class Source(ABC):
            @abstractmethod
            def metadata(self): ...

            @abstractmethod
            def __iter__(self): ...

        class Slotted:
            __slots__ = ("a",)

        def build(config, fast=False): return Core()
    """,
    "vllm.entrypoints.router": """
        router = object()

        @router.get("/health")
        def health(): ...

        @router.post("/pause")
        def pause(): ...
    """,
}
NAMES = {
    "Source": "vllm.engine:Source",
    "Meta": "vllm.engine:Meta",
    "build": "vllm.engine:build",
}
OURS = {
    "vllm.inflight.upstream": "def __getattr__(name): ...",
    "vllm.inflight.source": """
        from dataclasses import dataclass
        from vllm.inflight import upstream

        class Weights(upstream.Source):
            def metadata(self): return []

            def __iter__(self): return iter(())

        @dataclass
        class Shard(upstream.Meta):
            start: int

        def core():
            return upstream.build(None, fast=True)
    """,
    "vllm.inflight.engine": """
        from vllm.engine import Core

        class Mixin:
            def step(self, budget): return super().step(budget)

        class Client:
            def metadata(self): return []

            def __iter__(self): return iter(())

        def label(core: Core) -> str:
            return getattr(core, "_label")
    """,
}


@pytest.fixture
def reference(tmp_path: Path) -> Release:
    return release(tmp_path, "0.32.0", BEFORE, OURS, NAMES)


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    """Makes a release of the text of `BEFORE`, with replacements."""

    def make(*changes: tuple[str, str], name: str = "0.33.0") -> Release:
        files = {module: dedent(text) for module, text in BEFORE.items()}
        for old, new in changes:
            assert any(old in text for text in files.values()), old
            files = {module: text.replace(old, new) for module, text in files.items()}
        return release(tmp_path, name, files, OURS, NAMES)

    return make


def broken(found: Iterable[Finding]) -> list[str]:
    """What breaks, as `subject told`."""
    return [f"{f.subject} {f.told}" for f in found if f.state == BREAKS]


def states(found: Iterable[Finding]) -> set[str]:
    return {each.state for each in found}


def patch(path: str, *expects: str, **changes: Any) -> Patch:
    def around(original: Any) -> Any:
        return lambda self, budget: original(self, budget)

    facts = {"target": f"vllm.engine:{path}", "expects": expects, "around": around}
    return Patch(**(FACTS | facts | changes))


# ---------------------------------------------------------------------------- records


def test_records_that_fit_are_said_to_fit(reference):
    found = [
        *checks.patches(reference, [patch("Core.step", "self", "budget")]),
        *checks.names_of_records(
            reference,
            [
                Override(
                    target="vllm.engine:Core.step", expects=("self", "budget"), **FACTS
                ),
                Private(target="vllm.engine:Core._label", **FACTS),
            ],
        ),
    ]
    assert len(found) == 4
    assert states(found) == {FITS}


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("def step(self, budget)", "def walk(self, budget)", "is gone"),
        ("class Core", "class Engine", "is gone"),
        ("def step(self, budget)", "def step(self)", "has parameters (self), expected"),
        ("def step(self, budget): return budget", "step = 3", "is a value"),
    ],
)
def test_a_target_that_has_changed_breaks_its_patch(changed, old, new, told):
    found = checks.patches(changed((old, new)), [patch("Core.step", "self", "budget")])
    assert any(told in each for each in broken(found))


def test_a_changed_target_that_the_table_of_releases_has_is_no_break(
    changed, monkeypatch
):
    entries = {"0.33.0": ("self", "budget", "now")}
    monkeypatch.setitem(SIGNATURES, "vllm.engine:Core.step", entries)
    now = changed(("def step(self, budget)", "def step(self, budget, now=0)"))

    def takes_all(original: Any) -> Any:
        return lambda self, *args, **kwargs: original(self, *args, **kwargs)

    record = patch("Core.step", "self", "budget", around=takes_all)
    assert states(checks.patches(now, [record])) == {DIFFERS, FITS}
    record = patch("Core.step", "self", "budget")
    (told,) = broken(checks.patches(now, [record]))
    assert "our replacement does not take 'now' by position" in told


@pytest.mark.parametrize(
    "change",
    [
        ("def __init__", "def inflight(self): ...\n    def __init__"),
        ("_label", "inflight"),
    ],
)
def test_a_name_that_we_add_must_be_free(reference, changed, change):
    added = patch("Core.inflight", expects=None)
    assert states(checks.patches(reference, [added])) == {FITS}
    (told,) = broken(checks.patches(changed(change), [added]))
    assert "exists; we mean to add it" in told


def test_a_name_cannot_be_added_to_a_class_that_is_gone(changed):
    added = patch("Core.inflight", expects=None)
    now = changed(("class Core", "class Engine"))
    assert "Core is gone" in broken(checks.patches(now, [added]))[0]


def test_a_record_for_other_releases_is_not_checked(changed):
    record = patch("Core.walk", "self", since="0.31.0", before="0.33.0")
    assert states(checks.patches(changed(), [record])) == {ABSENT}


def test_a_private_attribute_that_is_gone_is_found(changed):
    record = Private(target="vllm.engine:Core._label", **FACTS)
    found = checks.names_of_records(changed(("_label", "_name")), [record])
    assert broken(found) == ["vllm.engine:Core._label is gone"]


@pytest.mark.parametrize(
    "target, name, change, told",
    [
        ("Core", "vllm_inflight", ("_label", "vllm_inflight"), "uses that name"),
        ("Core", "vllm_inflight", ("class Core", "class Engine"), "is gone"),
        ("Slotted", "other", ("_label", "_label"), "no room"),
        (
            "Core",
            "other",
            ("class Core:", "from msgspec import Struct\n\nclass Core(Struct):"),
            "no room",
        ),
    ],
)
def test_an_attribute_that_cannot_be_set_is_found(changed, target, name, change, told):
    old, new = change
    record = Attribute(target=f"vllm.engine:{target}", name=name, holds="x:Y", **FACTS)
    assert any(
        told in e for e in broken(checks.attributes(changed((old, new)), [record]))
    )


@pytest.mark.parametrize(
    "ours, theirs, told",
    [
        ("self, a, b=1", "self, a, b=1", None),
        ("self, *args, **kwargs", "self, a, b=1, *, c", None),
        ("self, a, **kwargs", "self, a, *, c=1", None),
        ("self, a", "self, a, b", "does not take 'b' by position"),
        ("self, b", "self, a", "has 'b' where upstream has 'a'"),
        ("self, a", "self, a=1", "needs 'a', which callers may leave out"),
        ("self, a, b", "self, a", "needs 'b', which upstream does not give"),
        ("self, *args", "self, a", "does not take 'a' by name"),
        ("self, a", "self, a, *, b=1", "does not take 'b'"),
        ("self", "self, *args", "does not take *args"),
        ("self", "self, **kwargs", "does not take **kwargs"),
    ],
)
def test_a_function_that_does_not_take_all_calls_is_found(ours, theirs, told):
    made = [signature(eval(f"lambda {text}: None")) for text in (ours, theirs)]
    assert misfit(*made, skip=1) == told


# ------------------------------------------------------------------------ our classes


@pytest.mark.parametrize(
    "old, new, told",
    [
        (
            "def metadata(self)",
            "def metadata(self, rank)",
            "Weights.metadata does not take 'rank' by position",
        ),
        (
            "@abstractmethod\n    def metadata",
            "@functools.cached_property\n    def metadata",
            "Weights.metadata is a function; in upstream it is a cached_property",
        ),
        (
            "def __iter__(self): ...",
            "def iter_full(self): ...",
            "Weights.__iter__ overrides nothing",
        ),
        (
            "def __iter__(self): ...",
            "def iter_full(self): ...",
            "Weights.iter_full is abstract in upstream, and we have no such method",
        ),
        ("class Source", "class Other", "Weights its base class Source is gone"),
        ("name: str", "name: str = ''", "Shard field start needs a default"),
        ("name: str", "name: str\n    start: int = 0", "is new in upstream"),
    ],
)
def test_a_base_class_that_has_changed_is_found(reference, changed, old, new, told):
    found = list(checks.derived_classes(changed((old, new)), reference))
    assert any(told in each for each in broken(found)), broken(found)


def test_a_mixin_is_compared_with_the_class_behind_it(reference, changed):
    records = {"vllm.inflight.engine:Mixin": ["vllm.engine:Core"]}
    assert broken(checks.mixins(changed(), reference, records)) == []
    now = changed(("def step(self, budget)", "def step(self, budget, limit=None)"))
    (told,) = broken(checks.mixins(now, reference, records))
    assert "Mixin.step does not take 'limit' by position" in told


def test_an_interface_that_grows_or_shrinks_is_found(reference, changed):
    records = {"vllm.inflight.engine:Client": "vllm.engine:Source"}
    assert broken(checks.protocols(changed(), reference, records)) == []
    now = changed(("def __iter__(self)", "def iter_full(self)"))
    told = " ".join(broken(checks.protocols(now, reference, records)))
    assert "Client.iter_full vllm.engine:Source has it now" in told
    assert "Client.__iter__ vllm.engine:Source has no such method any more" in told


# ------------------------------------------------------------------------------ names


def test_a_name_that_has_left_its_place_is_found(changed, monkeypatch):
    now = changed(("def build", "def construct"))
    assert broken(checks.names(now, NAMES)) == ["build vllm.engine:build is gone"]
    monkeypatch.setitem(PLACES, "build", {"0.33.0": "vllm.engine:construct"})
    now = changed(("def build", "def construct"))
    assert states(checks.names(now, NAMES)) == {FITS, DIFFERS}


def test_an_import_that_finds_nothing_is_found(reference, changed):
    assert broken(checks.imports(reference)) == []
    now = changed(("class Core", "class Engine"))
    (told,) = broken(checks.imports(now))
    assert told == "vllm.inflight.engine: vllm.engine:Core is gone"


def test_an_attribute_that_is_read_by_name_and_gone_is_found(reference, changed):
    now = changed(("_label", "_name"))
    (told,) = broken(checks.words(now, reference, []))
    assert told.startswith("_label is in no file of upstream")


def test_lines_for_other_releases_are_not_checked(changed, monkeypatch):
    entries = {
        "0.32.0": "vllm.inflight.engine:Mixin",
        "0.33.0": "vllm.inflight.source:Weights",
    }
    monkeypatch.setitem(ADAPTERS, "a test", entries)
    now = changed(("class Core", "class Engine"))
    assert broken(checks.imports(now)) == []
    assert "Mixin" not in {each.path for each in now.classes()}


# --------------------------------------------------------------------------- the rest


def test_a_field_that_upstream_declares_is_found(changed):
    record = Field("vllm.engine:Meta", "weight_versions")
    known = Field("vllm.engine:Meta", "weight_versions", declared_since="0.33.0")
    now = changed(("name: str", "name: str\n    weight_versions: list"))
    assert "declares it" in broken(checks.fields(now, [record]))[0]
    assert broken(checks.fields(now, [known])) == []
    assert "does not declare it" in broken(checks.fields(changed(), [known]))[0]


def test_a_model_that_is_gone_is_found(changed):
    record = Field("vllm.engine:Gone", "weight_versions")
    assert "its model is gone" in broken(checks.fields(changed(), [record]))[0]


@pytest.mark.parametrize(
    "path, told",
    [
        ("/rollback_weights", "has a path of ours"),
        ("/v2/weights/reload", "may go past our routes"),
        ("/v1/score", None),
    ],
)
def test_a_new_route_on_our_ground_is_found(reference, changed, path, told):
    old = '@router.post("/pause")'
    now = changed((old, f'@router.post("{path}")\ndef more(): ...\n\n{old}'))
    ours = [("POST", "/pause"), ("POST", "/rollback_weights")]
    found = broken(checks.routes(now, reference, ours))
    assert [told in each for each in found] == [True] * (told is not None)


def test_routes_are_found_in_every_form(changed):
    added = 'router.add_api_route("/a", pause, methods=["PUT"])'
    now = changed(("def pause(): ...", f"def pause(): ...\n\n{added}"))
    assert {("GET", "/health"), ("POST", "/pause"), ("PUT", "/a")} == {
        *checks.routes_of(now)
    }


def test_a_new_method_around_our_patches_is_found(reference, changed):
    records = [patch("Core.step", "self", "budget")]
    now = changed(("def step", "def pause_generation(self): ...\n\n    def step"))
    (told,) = broken(checks.ways_around(now, reference, records))
    assert told.startswith("vllm.engine:Core.pause_generation is new")
    records.append(patch("Core.pause_generation", "self", since="0.33.0"))
    assert broken(checks.ways_around(now, reference, records)) == []
    assert broken(checks.ways_around(reference, reference, records)) == []


def test_a_new_class_of_a_kind_is_found(reference, changed):
    records = {"vllm.engine:Source": ("vllm", "a test")}
    new = "class Added(Source): ...\n\nclass Slotted"
    now = changed(("class Slotted", new))
    (told,) = broken(checks.families(now, reference, records))
    assert told == "vllm.engine:Added is new; a test"


@pytest.mark.parametrize(
    "new, told",
    [("return Core", "has changed"), ("def construct", "is gone")],
)
def test_code_that_we_rely_on_and_that_has_changed_is_found(
    reference, changed, new, told
):
    old = {"return Core": "return Core()", "def construct": "def build"}[new]
    records = [RestsOn("vllm.engine:build", "a test")]
    (found,) = broken(checks.code(changed((old, new)), reference, records))
    assert told in found
    assert broken(checks.code(changed(), reference, records)) == []


@pytest.mark.seconds
def test_a_call_whose_argument_is_gone_is_found_by_types(
    reference, changed, tmp_path, monkeypatch
):
    monkeypatch.setattr(type_errors, "ROOM", tmp_path / "types")
    now = changed(("def build(config, fast=False)", "def build(config)"))
    told = broken(type_errors.new_errors(now, reference, []))
    assert len(told) == 1
    assert 'source.py: Unexpected keyword argument "fast"' in told[0]
    assert broken(type_errors.new_errors(reference, reference, [])) == []


def test_a_helper_of_a_patch_is_one_of_its_functions():
    def helper() -> None: ...

    def other() -> None: ...

    def around(original: Any, helper: Any = helper) -> Any: ...

    assert list(functions_of(around)) == [around, helper]
    assert list(functions_of(partial(around, helper=other))) == [around, other]


@pytest.mark.seconds
def test_an_attribute_of_a_derived_class_that_we_patch_is_no_error_of_types(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(type_errors, "ROOM", tmp_path / "types")
    theirs = {
        "vllm.engine": """
            class Core: ...

            class Process(Core):
                def __init__(self) -> None:
                    self.queue = 1
        """
    }
    ours = {
        "vllm.inflight.upstream": "",
        "vllm.inflight.use": """
            from vllm.engine import Core

            def both(core: Core) -> object:
                return core.queue, core.added, core.gone
        """,
    }
    one = release(tmp_path, "0.33.0", theirs, ours)
    process = patch("Process.added", expects=None)
    told = type_errors._told(one)
    assert len(told) == 3
    (only,) = type_errors._without(told, type_errors._had(one, [process]))
    assert '"gone"' in only
