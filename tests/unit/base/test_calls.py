"""Control calls: what travels, and what is refused of it."""

from __future__ import annotations

import pytest

from vllm.inflight.calls import PauseDecoding, call_from_dict, call_to_dict
from vllm.inflight.errors import Malformed


def test_a_call_arrives_as_it_was_sent():
    call = PauseDecoding("retract", lease_s=3.0, owner="trainer")
    assert call_from_dict(call.name, call_to_dict(call)) == call


def test_a_field_that_is_left_out_has_its_default():
    assert call_from_dict("pause", {"owner": "me"}) == PauseDecoding(owner="me")


def test_an_unknown_call_is_rejected_by_its_name():
    with pytest.raises(Malformed, match="no control call named 'pasue'"):
        call_from_dict("pasue", {})


def test_an_unknown_field_is_rejected_by_its_name():
    with pytest.raises(Malformed, match="'resume' has no field 'ownr'; it takes owner"):
        call_from_dict("resume", {"ownr": "me"})
