"""Control calls: what travels, what is refused of it, and who answers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields

import msgspec
import pytest

from vllm.inflight.calls import (
    CALLS,
    LeaveGroup,
    PauseDecoding,
    StartUpdate,
    call_from_dict,
    call_to_dict,
)
from vllm.inflight.engine.controller import Controller
from vllm.inflight.errors import Malformed


@pytest.mark.parametrize("name", CALLS)
def test_a_call_arrives_as_it_was_sent(name):
    needed = [field for field in fields(CALLS[name]) if field.default is MISSING]
    call = CALLS[name](**{field.name: "x" for field in needed})
    sent = msgspec.msgpack.encode(call_to_dict(call))
    assert call_from_dict(name, msgspec.msgpack.decode(sent)) == call


def test_a_field_that_is_left_out_has_its_default():
    assert call_from_dict("pause", {"owner": "me"}) == PauseDecoding(owner="me")


def test_an_unknown_call_is_rejected_by_its_name():
    with pytest.raises(Malformed, match="no control call named 'pasue'"):
        call_from_dict("pasue", {})


def test_an_unknown_field_is_rejected_by_its_name():
    with pytest.raises(Malformed, match="'resume' has no field 'ownr'; it takes owner"):
        call_from_dict("resume", {"ownr": "me"})
    with pytest.raises(Malformed, match="'info' has no field 'name'; it takes none"):
        call_from_dict("info", {"name": "info"})


def test_a_field_that_is_needed_is_named():
    with pytest.raises(Malformed, match="'leave_group' needs the field 'group_name'"):
        call_from_dict(LeaveGroup.name, {})


def test_the_identity_of_a_start_consists_of_the_fields_that_were_given():
    start = StartUpdate("u", allow_nonfinite=False, fingerprint="f")
    said = {"update_id": "u", "allow_nonfinite": False, "transport": "configured"}
    assert start.said() == said
    assert StartUpdate("u").said() != start.said()


def test_every_call_has_one_handler_and_every_handler_a_call():
    source = textwrap.dedent(inspect.getsource(Controller.handle))
    (match,) = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Match)]
    handled = [
        ast.unparse(pattern.cls).removeprefix("calls.")
        for case in match.cases
        for pattern in ast.walk(case.pattern)
        if isinstance(pattern, ast.MatchClass)
    ]
    assert sorted(handled) == sorted(kind.__name__ for kind in CALLS.values())


def test_no_two_calls_have_one_name():
    assert all(kind.name == name for name, kind in CALLS.items())
    declared = [
        node.name
        for node in ast.parse(inspect.getsource(inspect.getmodule(StartUpdate))).body
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted(declared) == sorted(kind.__name__ for kind in CALLS.values())
