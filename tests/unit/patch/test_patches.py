"""Patches fit this vLLM, are put in place once, and refuse what they do not know.

Whatever patches upstream runs in a process of its own; the rules of a single
record are tried on a module made for it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.preloaded_process import run
from vllm.inflight import patch
from vllm.inflight.attached import ATTRIBUTE
from vllm.inflight.engine.controller import Controller
from vllm.inflight.engine.scheduling import scheduler
from vllm.inflight.errors import UpstreamChanged
from vllm.inflight.patch.records.attributes import ATTRIBUTES
from vllm.inflight.patch.records.private_names import OVERRIDES, PRIVATES
from vllm.inflight.patch.records.record import (
    MARK,
    Attribute,
    Override,
    Patch,
    Private,
    apply,
    plain,
    problem_with,
    problem_with_attribute,
)
from vllm.inflight.releases.table import adapter, holds, installed

pytestmark = pytest.mark.seconds

PATCHES = patch.all_patches()
NAMES = [r for r in (*OVERRIDES, *PRIVATES) if holds(r.since, r.before)]

OF_OTHER_LIBRARIES = {
    *("_C", "_cdata", "_foreach_copy_", "_schema", "_snapshot", "_storage_Use_Count"),
    *("_Options", "_devices", "_timeout", "_untyped_storage", "_orig_mod"),
    "_release_ipc_counter_cuda",
    *("_checkpoint_conversion_mapping", "_keys_to_ignore_on_save"),
    *("_action_groups", "_option_string_actions", "_ops", "_current_frames"),
    "_construct_storage_from_data_pointer",
}
"""Private names of torch, transformers, argparse and sys."""


STATES = """if True:
    import json
    import _vllm_inflight_boot
    _vllm_inflight_boot._open()
    from vllm.inflight import patch
    from vllm.inflight.patch.records.record import (
        MARK, expected_of, locate, plain, problem_with
    )

    def state(record):
        if wrong := problem_with(record):
            return wrong, False, None
        owner, name, found = locate(record.target)
        if found is None and expected_of(record) is None:  # a value has no mark
            return None, name in vars(owner), None
        function = plain(found)
        return None, getattr(function, MARK, None) == record.target, id(function)

    def states():
        return map(state, patch.all_patches())

    def show():
        print(json.dumps(list(states())))
"""


def seen(code: str) -> list[Any]:
    """What is shown in a vLLM process of its own, whatever its release."""
    done = run("-c", STATES + code, env={patch.ALLOW_UNTESTED_ENV: "1"})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line[:2] == "[["]


@pytest.fixture(scope="module")
def untouched() -> Any:
    """State of every record in a vLLM that was not patched."""
    (states,) = seen("    show()\n")
    return states


@pytest.fixture(scope="module")
def patched() -> Any:
    """State of every record after the plugins were loaded, once and twice."""
    return seen("""
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    show()
    patch._applied = False
    patch.apply_all()
    show()
""")


@pytest.mark.parametrize("index", range(len(PATCHES)), ids=lambda i: PATCHES[i].target)
def test_the_signature_of_a_target_is_the_one_in_its_record(untouched, index):
    wrong, marked, _ = untouched[index]
    assert wrong is None
    assert not marked


@pytest.mark.parametrize("record", NAMES, ids=lambda record: record.target)
def test_the_signature_of_an_override_and_a_private_name_is_in_its_record(record):
    assert problem_with(record) is None


def test_a_missing_override_or_private_name_of_upstream_is_reported(engine):
    facts = {"why": "a test", "remove_when": "never"}
    for kind, name, expects, told in (
        (Override, "Core.step", ("self",), "expected"),
        (Override, "Core.gone", ("self",), "is gone"),
        (Private, "Core.gone", ("self",), "is gone"),
        (Private, "Core.step", ("self", "budget"), None),
    ):
        record = kind(target=f"stand_in_engine:{name}", expects=expects, **facts)
        wrong = problem_with(record)
        assert (wrong is None) if told is None else told in str(wrong)
    attribute = "vllm.v1.core.sched.scheduler:Scheduler._no_such_attribute"
    assert "is gone" in str(problem_with(Private(target=attribute, **facts)))


@pytest.mark.parametrize("record", ATTRIBUTES, ids=lambda record: record.target)
def test_no_attribute_of_ours_is_in_the_signature_of_a_class_of_upstream(record):
    assert problem_with_attribute(record) is None


def test_no_file_of_upstream_uses_the_name_of_our_attribute():
    (folder,) = find_spec("vllm").submodule_search_locations
    named = [
        file
        for file in Path(folder).rglob("*.py")
        if file.relative_to(folder).parts[0] != "inflight"
        and re.search(rf"\b{ATTRIBUTE}\b", file.read_text(errors="replace"))
    ]
    assert named == []


def attribute(target: str, **changes: Any) -> Attribute:
    holds = "vllm.inflight.engine.scheduling.request_state:RequestState"
    facts = {"why": "a test", "remove_when": "never"} | changes
    return Attribute(target=target, **({"holds": holds} | facts))


@pytest.mark.parametrize(
    "target, changes, told",
    [
        ("stand_in_engine:Core", {}, None),
        ("stand_in_engine:Gone", {}, "is gone"),
        ("stand_in_engine:Full", {}, "has no room"),
        ("vllm.v1.engine:EngineCoreOutput", {}, "has no room"),
        ("stand_in_engine:Core", {"name": "step"}, "of upstream's"),
        ("stand_in_engine:Derived", {"name": "step"}, "of upstream's"),
        # As a constructor sets it, as a dataclass has it, as another class derives it.
        ("vllm.v1.request:Request", {"name": "num_computed_tokens"}, "of upstream's"),
        (
            "vllm.v1.core.sched.output:SchedulerOutput",
            {"name": "num_scheduled_tokens"},
            "of upstream's",
        ),
        (
            "vllm.v1.worker.cpu_worker:CPUWorker",
            {"name": "parallel_config"},
            "of upstream's",
        ),
        ("stand_in_engine:Core", {"holds": "stand_in_engine:Core"}, "not derived"),
        ("stand_in_engine:Core", {"holds": "stand_in_engine:load"}, "no class"),
    ],
)
def test_an_attribute_that_conflicts_with_upstream_is_reported(
    engine, target, changes, told
):
    engine.Full = type("Full", (), {"__slots__": ()})
    engine.Derived = type("Derived", (engine.Core,), {})
    wrong = problem_with_attribute(attribute(target, **changes))
    assert wrong is None if told is None else told in str(wrong)


def overridden(kind: type) -> set[str]:
    """Names of `kind` that upstream's scheduler has as well."""
    theirs = vars(Scheduler).keys() - vars(object).keys()
    return {name for name in vars(kind).keys() & theirs if name[:2] != "__"}


def test_every_method_that_our_scheduler_overrides_has_a_record():
    recorded = {each.target.rpartition(".")[2] for each in NAMES if each in OVERRIDES}
    mixins = scheduler.InflightSchedulerMixin, adapter("order of waiting requests")
    assert set().union(*map(overridden, mixins)) == recorded


def privates(file: Path) -> Iterator[tuple[str, int]]:
    """The private names that a file uses of objects, and where."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            names = [arg for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            yield from ((str(name.value), node.lineno) for name in names)


def defined(file: Path) -> Iterator[str]:
    """The private names that a file gives to its own classes, objects and modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else ()


def test_no_other_file_uses_a_private_name_of_upstream_without_a_record():
    """Names that begin with `_inflight_` are ours; of upstream's, one is recorded."""
    room = Path(patch.__file__).parent
    files = [f for f in room.parent.rglob("*.py") if f.parent != room]
    ours = {name for file in files for name in defined(file)}
    recorded = {record.name for record in PRIVATES} | OF_OTHER_LIBRARIES
    recorded |= {record.target.rpartition(".")[2] for record in OVERRIDES}
    strangers = [
        f"{file.relative_to(room.parent)}:{line} uses {name}"
        for file in files
        for name, line in privates(file)
        if re.match(r"_(?!_|inflight_)", name) and name not in ours | recorded
    ]
    assert strangers == []


def test_vllms_own_plugin_loader_applies_every_patch(patched):
    once, _ = patched
    states = zip(PATCHES, once, strict=True)
    assert [record.target for record, (_, marked, _) in states if not marked] == []


def test_a_patched_target_still_has_its_signature(patched):
    once, _ = patched
    assert [wrong for wrong, _, _ in once if wrong] == []


def test_patching_twice_is_patching_once(patched):
    once, twice = patched
    assert twice == once


def test_patching_for_a_gpu_leaves_torch_unchanged():
    """Those replace `torch.cuda.Event`, and what says how much memory a GPU has."""
    code = """if True:
        import sys
        import _vllm_inflight_boot
        _vllm_inflight_boot._open()
        import torch
        import vllm.utils.torch_utils  # vLLM's own change of torch.cuda.set_stream
        from vllm.platforms import current_platform
        type(current_platform).device_type = "cuda"
        owners = torch, torch.cuda, torch.accelerator, torch.Tensor
        before = [dict(vars(owner)) for owner in owners]
        from vllm.inflight import patch
        patch.apply_all()
        for owner, had in zip(owners, before):
            for name, value in vars(owner).items():
                if name in had and had[name] is not value:
                    print("changed:", owner.__name__, name)
        for name in sys.modules:
            if "worker.cpu" in name:
                print("changed:", name)
    """
    done = subprocess.run(  # none that has imported the worker of a CPU
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {patch.ALLOW_UNTESTED_ENV: "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "changed:" not in done.stdout


def test_every_record_says_why_and_until_when():
    for record in PATCHES:
        assert record.why and record.remove_when, record.target
        assert not record.why.endswith("."), record.target
    targets = [record.target for record in PATCHES]
    assert len(set(targets)) == len(targets)


# One record, on a module of its own


@pytest.fixture
def engine(monkeypatch) -> ModuleType:
    """A module with a function, and a class with methods of every kind."""
    module = ModuleType("stand_in_engine")
    exec(
        """if True:
        def load(parser): return ["load"]

        class Core:
            def step(self, budget): return ["step"]

            @classmethod
            def build(cls, config): return ["build", cls.__name__]

            @staticmethod
            def add(parser): return ["add"]
        """,
        vars(module),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def record(path: str, *expects: str, **changes: Any) -> Patch:
    def around(original: Any) -> Any:
        return lambda *args, **kwargs: ["ours", *original(*args, **kwargs)]

    facts: dict[str, Any] = {
        "target": f"stand_in_engine:{path}",
        "expects": expects,
        "why": "a test",
        "remove_when": "never",
        "around": around,
    }
    return Patch(**(facts | changes))


@pytest.mark.parametrize(
    "change, call",
    [
        (record("load", "parser"), "load(0)"),
        (record("Core.step", "self", "budget"), "Core().step(0)"),
        (record("Core.build", "cls", "config"), "Core.build(0)"),
        (record("Core.add", "parser"), "Core.add(0)"),
    ],
    ids=lambda value: getattr(value, "target", None),
)
def test_a_patch_wraps_a_callable_of_any_kind_once(engine, change, call):
    before = eval(call, vars(engine))
    apply(change)
    apply(change)
    assert eval(call, vars(engine)) == ["ours", *before]
    assert problem_with(change) is None


@pytest.mark.parametrize("is_public", [True, False])
def test_a_module_that_imported_a_public_function_before_gets_the_patch(
    engine, monkeypatch, is_public
):
    paths = ["trainer", "vllm.inflight.stand_in", "vllm.stand_in"]
    modules = [ModuleType(path) for path in paths]
    for module in modules:
        module.load, module.begin = engine.load, engine.load
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = engine.load
    apply(record("load", "parser", is_public=is_public))
    assert engine.load is not before
    users = [(module.load, module.begin) for module in modules[:2]]
    assert users == [(engine.load if is_public else before,) * 2] * 2
    assert modules[2].load is before  # upstream calls what it has called


def test_a_public_function_is_patched_in_the_module_that_defines_it(
    engine, monkeypatch
):
    definer = ModuleType("vllm.stand_in")
    definer.load, engine.load.__module__ = engine.load, definer.__name__
    monkeypatch.setitem(sys.modules, definer.__name__, definer)
    apply(record("load", "parser", is_public=True))
    assert definer.load is engine.load
    assert engine.load(0) == ["ours", "load"]


def test_a_parameter_that_ray_adds_to_actor_methods_is_no_change(engine):
    def step(self, budget, _ray_trace_ctx=None):
        return [budget]

    engine.Core.step = step
    apply(record("Core.step", "self", "budget"))
    assert engine.Core().step(0) == ["ours", 0]


def test_a_changed_signature_is_rejected_naming_both(engine):
    change = record("Core.step", "self")
    before = engine.Core.step
    with pytest.raises(UpstreamChanged) as refusal:
        apply(change)
    assert "('self', 'budget')" in str(refusal.value)
    assert "expected ('self',)" in str(refusal.value)
    assert "stand_in_engine:Core.step" in str(refusal.value)
    assert engine.Core.step is before


@pytest.mark.parametrize("target", ["Core.gone", "Gone.step", "Core.step.deeper"])
def test_a_target_that_is_gone_is_rejected_by_name(engine, target):
    with pytest.raises(UpstreamChanged, match=r"stand_in_engine:.* is gone"):
        apply(record(target, "self"))


def test_a_module_that_is_gone_is_rejected_by_name():
    with pytest.raises(UpstreamChanged, match="no_such_module"):
        apply(record("", target="vllm.no_such_module:f"))


def test_a_method_is_added_only_if_upstream_has_none_of_that_name(engine):
    def ours(self: Any) -> str:
        return "ours"

    free = record("Core.extra", expects=None, around=lambda _: ours)
    apply(free)
    apply(free)
    assert engine.Core().extra() == "ours"
    assert getattr(plain(engine.Core.extra), MARK) == free.target

    taken = record("Core.step", expects=None, around=lambda _: ours)
    with pytest.raises(UpstreamChanged, match=r"Core\.step exists"):
        apply(taken)


# Releases


def test_the_installed_release_is_a_supported_one():
    assert patch.check_release().split("+")[0] in patch.SUPPORTED


@pytest.mark.parametrize("found", ["0.28.0", "0.34.0", "0.32.1", "0.32.0rc1", "dev"])
def test_an_untested_release_is_rejected_naming_both(monkeypatch, found):
    monkeypatch.setattr("vllm.version.__version__", found)
    monkeypatch.delenv(patch.ALLOW_UNTESTED_ENV, raising=False)
    with pytest.raises(UpstreamChanged) as refusal:
        patch.check_release()
    assert found in str(refusal.value)
    assert "0.32.0" in str(refusal.value)
    assert patch.ALLOW_UNTESTED_ENV in str(refusal.value)


def test_an_untested_release_can_be_allowed(monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.34.0")
    monkeypatch.setenv(patch.ALLOW_UNTESTED_ENV, "1")
    assert patch.check_release() == "0.34.0"


def test_a_flag_allows_an_untested_release_in_every_process(monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.34.0")
    monkeypatch.setenv(patch.ALLOW_UNTESTED_ENV, "")
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", patch.ALLOW_UNTESTED_FLAG])
    assert patch.check_release() == "0.34.0"
    assert os.environ[patch.ALLOW_UNTESTED_ENV] == "1"


@pytest.mark.parametrize("found", ["0.34.0.dev3+g1a2b3c4", "0.33.0rc1", "dev"])
def test_a_build_between_releases_is_rejected_as_one(monkeypatch, found):
    monkeypatch.setattr("vllm.version.__version__", found)
    monkeypatch.delenv(patch.ALLOW_UNTESTED_ENV, raising=False)
    with pytest.raises(UpstreamChanged, match="a build between two releases"):
        patch.check_release()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", "0.32.0+cu129"])
def test_a_local_build_of_the_tested_release_is_accepted(monkeypatch, found):
    monkeypatch.setattr("vllm.version.__version__", found)
    monkeypatch.delenv(patch.ALLOW_UNTESTED_ENV, raising=False)
    assert patch.check_release() == found


def load_plugins_with(surprise: str) -> Any:
    return run(
        "-c",
        f"import vllm.plugins as plugins\n{surprise}\nplugins.load_general_plugins()",
    )


def test_vllm_does_not_start_with_a_changed_signature():
    done = load_plugins_with(
        "from vllm.v1.engine.core import EngineCore\n"
        "EngineCore.shutdown = lambda self, grace_s: None"
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "EngineCore.shutdown has parameters ('self', 'grace_s')" in last
    assert "expected ('self',)" in last


def test_an_untested_release_starts_loudly():
    untested = f"{installed().rpartition('.')[0]}.99"
    done = run(
        "-c",
        "import vllm.plugins as plugins, vllm.version\n"
        f"vllm.version.__version__ = '{untested}'\nplugins.load_general_plugins()",
        env={patch.ALLOW_UNTESTED_ENV: "1"},
    )
    assert done.returncode == 0, done.stderr
    told = f"vLLM {untested} was not tested with vllm-inflight"
    assert told in done.stdout + done.stderr


def test_vllm_does_not_start_in_an_untested_release():
    done = load_plugins_with("import vllm.version\nvllm.version.__version__ = '0.99.0'")
    assert done.returncode == 1
    assert "0.99.0" in done.stderr.strip().splitlines()[-1]


def test_a_controller_made_before_the_scheduler_raises_an_error():
    """Upstream may move the step that makes the controller, and keep its signature."""
    with pytest.raises(UpstreamChanged, match="before it has a scheduler"):
        Controller(SimpleNamespace(vllm_config=None, model_executor=None))
