"""Rules of the code that nobody has to remember, because they fail here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "vllm" / "inflight"

VOCABULARY = (
    *("__init__", "config", "errors", "packed", "yielding", "update", "tensor_names"),
    *("release_fields", "messages"),
)
ROOMS = (
    VOCABULARY,
    ("background",),
    ("connection",),
    ("ops", "_C"),
    ("upstream",),
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
"""The way of the data: a file imports from its own package or from an earlier one."""

ALIASES = {"wire"}
"""Import paths of earlier releases, which re-export and hold no code."""

LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    """The room of `vllm.inflight.worker.shadow.shadow_model`: `stage`."""
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
def test_a_room_imports_only_from_itself_and_from_rooms_before_it(file):
    own = room(module_of(file))
    assert own in LEVEL, f"{own} is a new room: give it its place in ROOMS"
    backwards = [
        f"{ids(file)}:{line} imports {module}"
        for line, module in imports(file)
        if is_ours(module) and LEVEL[room(module)] > LEVEL[own]
    ]
    assert backwards == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_a_page_lists_every_room_in_order(page):
    table = (ROOT / page).read_text().partition("| package |")[2].partition("\n\n")[0]
    listed = [
        LEVEL[name] for name in re.findall(r"`(\w+)(?:\.py|/)`", table) if name in LEVEL
    ]
    assert listed == sorted(listed)
    unlisted = {name for name in LEVEL if not re.search(rf"`{name}(\.py|/)`", table)}
    assert unlisted == {"__init__", "_C", *ALIASES}


def unit(module: str) -> str:
    """What a module belongs to: its package's sub-package, or itself."""
    return ".".join(module.split(".")[2:4])


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Every group of names that can be reached from each other."""
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


def test_circles_are_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(arrows) == [["b", "c"]]


FOR_TYPES = "vllm/inflight/engine/context.py"
"""Its Protocol names classes that are given it: for annotations, never at run time."""


def test_the_context_of_the_engine_imports_nothing_at_run_time():
    body = ast.parse((ROOT / FOR_TYPES).read_text()).body
    names = [node.module for node in body if isinstance(node, ast.ImportFrom)]
    assert names == ["__future__", "typing"]


@pytest.mark.parametrize("of", [module_of, lambda file: unit(module_of(file))])
def test_no_module_and_no_package_imports_itself_by_way_of_others(of):
    modules = {module_of(file): of(file) for file in FILES}
    arrows: dict[str, set[str]] = {name: set() for name in modules.values()}
    for file in FILES:
        if ids(file) == FOR_TYPES:
            continue
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


def test_only_the_two_doors_name_modules_of_upstream():
    strangers = [
        f"{ids(file)}:{line} imports {module}"
        for file in FILES
        if room(module_of(file)) not in ("upstream", "patch")
        for line, module in imports(file)
        if is_upstream(module)
    ]
    assert strangers == []


def test_the_vocabulary_is_plain_data():
    """It imports neither vLLM nor torch, so every process can afford it."""
    heavy = [
        f"{ids(file)}:{line} imports {module}"
        for file in FILES
        if room(module_of(file)) in VOCABULARY
        for line, module in imports(file)
        if module.split(".")[0] in ("torch", "numpy", "transformers", "fastapi")
        or is_upstream(module)
    ]
    assert heavy == []


def test_the_trainer_room_knows_nothing_of_the_engine():
    """What runs in a trainer: the vocabulary, threads, connections and ops, no more."""
    allowed = {*VOCABULARY, "background", "connection", "ops", "_C", "trainer"}
    strangers = [
        f"{ids(file)}:{line} imports {module}"
        for file in FILES
        if room(module_of(file)) == "trainer"
        for line, module in imports(file)
        if is_upstream(module) or (is_ours(module) and room(module) not in allowed)
    ]
    assert strangers == []


def test_fastapi_stays_at_the_door():
    strangers = [
        f"{ids(file)}:{line}"
        for file in FILES
        if room(module_of(file)) not in ("api", "patch")
        for line, module in imports(file)
        if module.split(".")[0] in ("fastapi", "starlette")
    ]
    assert strangers == []


RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "torch.load", "np.load", "numpy.load", "yaml.load"}


def test_one_file_reads_pickles_and_no_file_runs_text():
    """The unpickler is behind a flag, and knows a dozen names."""
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
    assert found == {"vllm/inflight/transport/files/safe_unpickler.py"}


def test_there_is_no_package_of_ours_in_the_place_of_upstreams():
    assert not (ROOT / "vllm" / "__init__.py").exists()
    assert sorted(p.name for p in (ROOT / "vllm").iterdir() if p.is_dir()) == [
        "inflight"
    ]


def test_there_is_no_test_inside_the_package():
    assert [f for f in FILES if f.name.startswith(("test_", "conftest"))] == []


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        if [ast.unparse(d) for d in node.decorator_list] == ["overload"]:
            continue
        if ast.get_docstring(node) is None:
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{node.name}.")


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_every_module_and_every_public_name_says_what_it_is(file):
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree) is not None
    assert list(undocumented(tree.body)) == []


def test_the_page_of_the_architecture_lists_the_rooms_in_this_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = [
        name
        for names in ROOMS
        for name in names
        if (PACKAGE / name).is_dir() and name not in ALIASES
    ]
    places = [page.find(f"`{name}/`") for name in folders]
    assert -1 not in places, dict(zip(folders, places, strict=True))
    assert places == sorted(places)
