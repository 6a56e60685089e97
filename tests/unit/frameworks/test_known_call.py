"""The table of known calls, and how a call is recognised."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.inflight.errors import ConfigError
from vllm.inflight.frameworks import table
from vllm.inflight.frameworks.known_call import KnownCall, Role, located, methods_of
from vllm.inflight.frameworks.table import BUILT_IN, known_calls, matched

ROW = KnownCall(
    framework="tests", method="push", parameters=("a", "b"), role=Role.VERSION
)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1, 2), {}, {"a": 1, "b": 2}),
        ((1,), {"b": 2}, {"a": 1, "b": 2}),
        ((1,), {}, {"a": 1}),
        ((1, 2, 3), {}, None),
        ((1,), {"a": 2}, None),
        ((), {"c": 2}, None),
    ],
)
def test_arguments_are_bound_to_the_parameters_by_name(
    args: Any, kwargs: Any, expected: Any
) -> None:
    assert ROW.bound(args, kwargs) == expected


class Same:
    def push(self, a: int, b: int = 0) -> None: ...


class Fork:
    def push(self, a: int, c: int = 0) -> None: ...


class Other:
    push = 3


def traced(method: Any) -> Any:
    """As a decorator without `functools.wraps`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


def retried(method: Any) -> Any:
    """As a decorator that holds itself, and a function besides."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapper if traced(method) else fallback()

    def fallback() -> None: ...

    return wrapper


class Decorated:
    push = traced(traced(Same.push))


class DecoratedFork:
    push = traced(Fork.push)


class Hidden:
    push = retried(Same.push)


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (Same, True),
        (Fork, False),
        (Other, False),
        (Decorated, True),
        (DecoratedFork, False),
        (Hidden, False),
    ],
)
def test_a_method_is_known_by_its_name_and_its_parameters(
    kind: type, fits: bool
) -> None:
    assert ROW.is_of(methods_of(kind, [ROW])) == fits


def test_methods_of_one_name_are_told_apart_by_their_parameters() -> None:
    name = "update_weights_from_ipc"
    frameworks = {
        row.framework: [r.framework for r in matched({name: row.parameters})]
        for row in BUILT_IN
        if row.method == name
    }
    assert frameworks == {f: [f] for f in ("verl", "ms-swift", "checkpoint-engine")}


@pytest.mark.parametrize(
    ("version", "label"), [(3, "3"), (0, "0"), ("a", "a"), ("", None), (None, None)]
)
def test_a_version_without_a_name_has_no_label(version: Any, label: str | None) -> None:
    (row,) = (each for each in BUILT_IN if each.method == "receive_weight_update")
    request = json.dumps({"version": version})
    assert row.label_of({"request_json": request}) == label


def test_every_row_can_end_a_version_or_has_one_that_does() -> None:
    for row in BUILT_IN:
        of_framework = [r for r in BUILT_IN if r.framework == row.framework]
        assert any(
            r.role in (Role.VERSION, Role.COMPLETING, Role.END) or r.is_last is not None
            for r in of_framework
        )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("tests.unit.frameworks.no_such_module:ROW", "cannot be loaded"),
        ("tests.unit.frameworks.test_known_call:Same", "must be a KnownCall"),
        ("tests.unit.frameworks.test_known_call:WRONG", "must be a KnownCall"),
    ],
)
def test_an_entry_point_that_names_no_row_is_rejected_by_name(
    value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("own", value, table.ENTRY_POINTS)
    monkeypatch.setattr(table, "entry_points", lambda group: [point])
    known_calls.cache_clear()
    with pytest.raises(
        ConfigError, match=rf"'own' of {table.ENTRY_POINTS} .*({problem})"
    ):
        known_calls()
    monkeypatch.undo()
    known_calls.cache_clear()


WRONG = [SimpleNamespace()]


def test_a_load_step_is_found_by_its_module_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A framework that cannot be imported costs its adoption, and not the engine."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "with_step.py").write_text("def prepare(): pass\nnumber = 1\n")
    (tmp_path / "of_another_torch.py").write_text("raise AttributeError('gone')\n")
    module, name = located("with_step:prepare") or (None, "")
    assert (getattr(module, "__name__", ""), name) == ("with_step", "prepare")
    for step in ("with_step:process", "with_step:number", "not_installed:prepare"):
        assert located(step) is None
    assert not caplog.records
    with caplog.at_level("WARNING"):
        assert located("of_another_torch:prepare") is None
    assert "of_another_torch cannot be imported: gone" in caplog.text
