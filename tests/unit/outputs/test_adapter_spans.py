"""Stamps and spans that tell which load of an adapter sampled a token."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.outputs import WeightVersionSpan

from vllm.inflight.engine.scheduling.lora import Adapters
from vllm.inflight.engine.scheduling.version_stamp import Stamp
from vllm.inflight.outputs.spans import as_dicts, decoded


@given(st.text().filter(lambda label: label != "["), st.integers(min_value=0))
def test_adapter_loads_round_trip_through_a_stamp(label: str, epoch: int):
    loads = ((label, epoch, 3), ("[", 2, 1))
    stamped = Stamp(label, epoch, loads)
    assert Stamp.decode(stamped.encode()) == stamped
    assert [stamped.load_of("[", number) for number in (1, 2)] == [0, 1]


def test_a_load_of_an_adapter_begins_a_span_for_its_requests_only():
    steps = [Stamp("a", 1), Stamp("a", 1, (("x", 1, 1),)), Stamp("b", 2)]
    spans = [
        WeightVersionSpan(stamp.encode(), start, start + 1)
        for start, stamp in enumerate(steps)
    ]
    adapter = SimpleNamespace(lora_name="x", lora_int_id=1)
    other = SimpleNamespace(lora_name="y", lora_int_id=1)
    loads = [(s.start, s.end, s.adapter_load) for s in decoded(spans, adapter)]
    assert loads == [(0, 1, 0), (1, 2, 1), (2, 3, 0)]
    assert [(s.start, s.end) for s in decoded(spans, other)] == [(0, 2), (2, 3)]
    assert as_dicts(decoded(spans)) == [
        {"version": "a", "epoch": 1, "start": 0, "end": 2},
        {"version": "b", "epoch": 2, "start": 2, "end": 3},
    ]


def test_a_stamp_contains_only_replaced_adapters_that_requests_use():
    requests: dict[str, Any] = {}
    adapters = Adapters(requests)
    asked = [LoRARequest("x", number, "/x") for number in range(1, 1001)]
    for adapter in asked:
        adapters.load(adapter)
    assert adapters.replaced == ()
    requests["r"] = SimpleNamespace(lora_request=asked[6])
    adapters.load(asked[6])
    assert adapters.replaced == (("x", 7, 6),)
    adapters.drop(7)
    assert adapters.replaced == (("x", 7, 1000),)
    assert adapters.load_of(asked[6]) == 1000
    del requests["r"]
    adapters.load(LoRARequest("y", 1, "/y"))
    assert adapters.replaced == ()


def test_a_request_has_its_adapter_from_the_files_of_the_last_load():
    adapters = Adapters({})
    asked, later = LoRARequest("x", 1, "/a"), LoRARequest("x", 1, "/b")
    assert adapters.from_last_files(asked) is asked
    adapters.note_files(LoRARequest("x", 1, "/b", load_inplace=True))
    for request in (asked, later):
        found = adapters.from_last_files(request)
        assert (found.lora_path, found.load_inplace) == ("/b", False)
    again = LoRARequest("x", 1, "/c", load_inplace=True)
    assert adapters.from_last_files(again) is again
    adapters.drop(1)
    assert adapters.from_last_files(asked) is asked
