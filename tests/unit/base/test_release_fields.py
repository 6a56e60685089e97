"""Fields that other releases of vLLM take: ignored where they change nothing here."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.inflight.errors import Malformed
from vllm.inflight.releases.fields import START, UPDATE_INFO, settled


@pytest.mark.parametrize(
    "table, body",
    [
        (START, {"is_checkpoint_format": True}),
        (START, {"is_checkpoint_format": None}),
        (UPDATE_INFO, {"is_checkpoint_format": True, "update_kind": "dense"}),
        (UPDATE_INFO, {"num_updates_list": None, "packed": None}),
    ],
)
def test_fields_that_change_nothing_are_ignored(table: Any, body: dict[str, Any]):
    assert settled(body | {"names": ["a"]}, table) == {"names": ["a"]}


@pytest.mark.parametrize(
    "table, name, value, remedy",
    [
        (START, "is_checkpoint_format", False, "in checkpoint format"),
        (START, "is_checkpoint_format", 1, "in checkpoint format"),
        (START, "is_checkpoint_format", "true", "in checkpoint format"),
        (UPDATE_INFO, "is_checkpoint_format", False, "in checkpoint format"),
        (UPDATE_INFO, "update_kind", "sparse_flat", "send whole tensors"),
        (UPDATE_INFO, "num_updates_list", [3], "send whole tensors"),
        (UPDATE_INFO, "packed", True, "give it in init_info"),
        (UPDATE_INFO, "packed_num_buffers", 2, "give it in init_info"),
    ],
)
def test_an_unsupported_value_is_rejected_by_name_with_a_remedy(
    table: Any, name: str, value: Any, remedy: str
):
    with pytest.raises(Malformed) as raised:
        settled({name: value}, table)
    for part in (name, repr(value), table[name].releases, remedy):
        assert part in raised.value.message


def test_fields_may_repeat_the_options_that_opened_the_transport():
    transport = SimpleNamespace(packed=True, packed_num_buffers=2)
    said = {"packed": True, "packed_num_buffers": 2}
    assert settled(said, UPDATE_INFO, opened_with=transport) == {}
    with pytest.raises(Malformed, match="packed_num_buffers cannot be 3"):
        settled({"packed_num_buffers": 3}, UPDATE_INFO, opened_with=transport)


def test_a_field_that_the_reader_supports_is_passed_on():
    said = {"packed": True, "update_kind": "dense"}
    known = frozenset({"packed"})
    assert settled(said, UPDATE_INFO, known=known) == {"packed": True}
