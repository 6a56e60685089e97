"""Rules of the code; a change that breaks one fails here."""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.inflight import config, errors, ops, trainer
from vllm.inflight.attached import ATTRIBUTE
from vllm.inflight.patch import api as methods_of_engines
from vllm.inflight.patch.records.attributes import ATTRIBUTES

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "vllm" / "inflight"

VOCABULARY = (
    *("__init__", "config", "errors", "packed", "yielding", "update", "tensor_names"),
    *("messages", "calls", "wording"),
)
PACKAGES = (
    VOCABULARY,
    ("background",),
    ("connection",),
    ("ops", "_C"),
    ("delta",),
    ("releases",),
    ("frameworks",),
    ("upstream",),
    ("attached",),
    ("trainer",),
    ("transport",),
    ("wire",),
    ("worker",),
    ("engine",),
    ("outputs",),
    ("api",),
    ("patch",),
    ("cli",),
)
"""Packages in the order of the data; a file imports from its own or an earlier one."""

ALIASES = {"wire"}
"""Import paths of earlier releases, which re-export and hold no code."""

LEVEL = {name: level for level, names in enumerate(PACKAGES) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def package(module: str) -> str:
    """The package of `vllm.inflight.worker.shadow.shadow_model`: `worker`."""
    return [*module.split("."), "__init__"][2]


def module_of(file: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            assert node.module is not None
            # `from package import name`: the name may be a module of its own.
            for alias in node.names:
                inside = PACKAGE.parents[1].joinpath(*node.module.split("."))
                is_module = (inside / alias.name).is_dir() or (
                    inside / f"{alias.name}.py"
                ).is_file()
                yield node.lineno, f"{node.module}{f'.{alias.name}' * is_module}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "find_spec")
        ):
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def is_ours(module: str) -> bool:
    return module == "vllm.inflight" or module.startswith("vllm.inflight.")


def is_upstream(module: str) -> bool:
    return module.split(".")[0] == "vllm" and not is_ours(module)


def ids(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_a_package_imports_only_from_itself_and_from_earlier_ones(file):
    own = package(module_of(file))
    assert own in LEVEL, f"{own} is a new package: give it its place in PACKAGES"
    backwards = [
        f"{ids(file)}:{line} imports {module}"
        for line, module in imports(file)
        if is_ours(module) and LEVEL[package(module)] > LEVEL[own]
    ]
    assert backwards == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_a_page_lists_every_package_in_order(page):
    table = (ROOT / page).read_text().partition("| package |")[2].partition("\n\n")[0]
    listed = [
        LEVEL[name] for name in re.findall(r"`(\w+)(?:\.py|/)`", table) if name in LEVEL
    ]
    assert listed == sorted(listed)
    unlisted = {name for name in LEVEL if not re.search(rf"`{name}(\.py|/)`", table)}
    assert unlisted == {"__init__", "_C", *ALIASES}


def unit(module: str) -> str:
    """The sub-package of a module, or the module itself."""
    return ".".join(module.split(".")[2:4])


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of names that can be reached from each other."""
    reach = {name: set(to) for name, to in arrows.items()}
    for middle in arrows:
        for name in arrows:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    in_circles = {name for name in arrows if name in reach[name]}
    groups = {
        frozenset(other for other in in_circles & reach[name] if name in reach[other])
        for name in in_circles
    }
    return sorted(map(sorted, groups))


def test_import_cycles_are_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(arrows) == [["b", "c"]]


@pytest.mark.parametrize("of", [module_of, lambda file: unit(module_of(file))])
def test_no_module_and_no_package_imports_itself_through_others(of):
    modules = {module_of(file): of(file) for file in FILES}
    arrows: dict[str, set[str]] = {name: set() for name in modules.values()}
    for file in FILES:
        for _, module in imports(file):
            if (to := modules.get(module, of(file))) != of(file):
                arrows[of(file)].add(to)
    assert circles(arrows) == []


def test_no_public_class_has_the_name_of_another():
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(ids(file))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


OF_THE_RELEASE = {"vllm.version"}
"""The one module of upstream that `releases/table.py` reads."""


def test_only_upstream_py_and_patch_name_modules_of_upstream():
    strangers = [
        f"{ids(file)}:{line} imports {module}"
        for file in FILES
        if package(module_of(file)) not in ("upstream", "patch")
        for line, module in imports(file)
        if is_upstream(module)
        and not (file.parent.name == "releases" and module in OF_THE_RELEASE)
    ]
    assert strangers == []


OF_UPSTREAM = {"_inflight_prefills"}
"""A name of upstream's that begins as ours once did; it is in private_names.py."""

BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "get", "pop", "setdefault")


def attributes_of_ours(code: str) -> Iterator[tuple[int, str]]:
    """(line, name) of attributes that begin with `inflight`, or are of that name."""
    for node in ast.walk(ast.parse(code)):
        names: list[object] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Subscript) and "vars(" in ast.unparse(node.value):
            names = [getattr(node.slice, "value", None)]
        elif isinstance(node, ast.Call) and (
            ast.unparse(node.func).rpartition(".")[2] in BY_NAME
        ):
            named = [arg for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            is_of_object = "vars(" in ast.unparse(node) or "attr(" in ast.unparse(node)
            names = [arg.value for arg in named] if is_of_object else []
        for name in names:
            if re.match(r"_*(inflight_|vllm_inflight$)", str(name)):
                yield node.lineno, str(name)


@pytest.mark.parametrize(
    "code",
    [
        *("request.inflight_root = 1", "request._inflight_root", "x.vllm_inflight"),
        *("setattr(a, 'inflight_b', 1)", "getattr(a, '_inflight_b', None)"),
        *("vars(a)['_inflight_b'] = 1", "vars(a).get('inflight_b')"),
    ],
)
def test_an_attribute_of_ours_is_found_however_it_is_named(code):
    assert len(list(attributes_of_ours(code))) == 1


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_our_state_on_objects_of_upstream_is_under_one_name(file):
    """`attached.py` has the name, and `attributes.py` lists the classes."""
    found = attributes_of_ours(file.read_text())
    strangers = [f"{ids(file)}:{line} {name}" for line, name in found]
    assert [each for each in strangers if each.split()[1] not in OF_UPSTREAM] == []


def test_every_class_that_is_attached_has_a_record_and_every_record_a_class():
    classes = {
        f"{module_of(file)}:{node.name}"
        for file in FILES
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base) for base in node.bases}
        & {"Attached", "AttachedOnDemand", "SchedulerState"}
        and node.name not in ("AttachedOnDemand", "SchedulerState")
    }
    kept = {record.holds for record in ATTRIBUTES if record.name == ATTRIBUTE}
    assert classes == kept


def test_the_vocabulary_is_plain_data():
    """It imports neither vLLM nor torch, so every process can import it."""
    heavy = [
        f"{ids(file)}:{line} imports {module}"
        for file in FILES
        if package(module_of(file)) in VOCABULARY
        for line, module in imports(file)
        if module.split(".")[0] in ("torch", "numpy", "transformers", "fastapi")
        or is_upstream(module)
    ]
    assert heavy == []


def test_the_trainer_package_knows_nothing_of_the_engine():
    """It imports the plain data, threads, connections and ops, and nothing else."""
    allowed = {*VOCABULARY, "background", "connection", "ops", "_C", "delta", "trainer"}
    strangers = [
        f"{ids(file)}:{line} imports {module}"
        for file in FILES
        if package(module_of(file)) == "trainer"
        for line, module in imports(file)
        if is_upstream(module) or (is_ours(module) and package(module) not in allowed)
    ]
    assert strangers == []


def test_only_api_and_patch_import_fastapi():
    strangers = [
        f"{ids(file)}:{line}"
        for file in FILES
        if package(module_of(file)) not in ("api", "patch")
        for line, module in imports(file)
        if module.split(".")[0] in ("fastapi", "starlette")
    ]
    assert strangers == []


RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "torch.load", "np.load", "numpy.load", "yaml.load"}


def test_one_file_reads_pickles_and_no_file_runs_text():
    """The unpickler is behind a flag, and accepts a dozen names."""
    found = set()
    for file in FILES:
        named = {module.split(".")[0] for _, module in imports(file)}
        called = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
        }
        if named & RUNS_WHAT_IT_READS or called & CALLS:
            found.add(ids(file))
    assert found == {"vllm/inflight/transport/sglang/safe_unpickler.py"}


def test_our_folder_hides_no_package_of_upstream():
    assert not (ROOT / "vllm" / "__init__.py").exists()
    assert sorted(p.name for p in (ROOT / "vllm").iterdir() if p.is_dir()) == [
        "inflight"
    ]


def test_there_is_no_test_inside_the_package():
    assert [f for f in FILES if f.name.startswith(("test_", "conftest"))] == []


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_every_module_says_what_it_is(file):
    assert ast.get_docstring(ast.parse(file.read_text())) is not None


def own_members(kind: type) -> Iterator[object]:
    """The public functions and properties that a class defines itself."""
    for name, member in vars(kind).items():
        kinds = types.FunctionType | classmethod | staticmethod | property
        if not name.startswith("_") and isinstance(member, kinds):
            yield member


def public_api() -> Iterator[object]:
    """What users import, call and catch."""
    for module in (config, errors):
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and name[0] != "_":
                yield value
    for module in (trainer, ops):
        yield from (getattr(module, name) for name in module.__all__)
    yield from methods_of_engines.METHODS


def test_the_whole_public_api_has_docstrings():
    public = list(public_api())
    public += [
        m for each in public if isinstance(each, type) for m in own_members(each)
    ]
    assert len(public) > 80
    assert [each for each in public if not getattr(each, "__doc__", None)] == []


def test_the_page_of_the_architecture_lists_the_packages_in_this_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = [
        name
        for names in PACKAGES
        for name in names
        if (PACKAGE / name).is_dir() and name not in ALIASES
    ]
    places = [page.find(f"`{name}/`") for name in folders]
    assert -1 not in places, dict(zip(folders, places, strict=True))
    assert places == sorted(places)
