"""The catalogue of names that a trainer may send: packed by ranks, merged into one."""

import json
from types import SimpleNamespace
from typing import Any

from vllm.inflight.worker import catalogue
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint


def shadow(origin: StartCheckpoint, known: Any) -> Any:
    return SimpleNamespace(start_checkpoint=origin, known_names=known)


def test_the_catalogue_lists_the_tensors_of_the_start_checkpoint():
    origin = StartCheckpoint({"a": (2, 3), "b": None}, {"a": "bfloat16"})
    found = catalogue.catalogue(shadow(origin, {"c": ([1], "int8")}), is_cut=True)
    assert catalogue.unpacked([found]) == {
        "of": "checkpoint",
        "num_tensors": 2,
        "tensors": [
            {"name": "a", "shape": [2, 3], "dtype": "bfloat16"},
            {"name": "b", "shape": None, "dtype": None},
        ],
    }


def test_the_catalogue_lists_the_models_own_names_if_the_checkpoint_is_unknown():
    first = shadow(StartCheckpoint({}), {"a": ([4], "float32"), "b": (None, "float32")})
    second = shadow(StartCheckpoint({}), {"b": (None, "float32"), "c": ([2], "int8")})
    whole = [catalogue.catalogue(each, is_cut=False) for each in (first, second)]
    told = catalogue.unpacked(whole)
    assert (told["of"], told["num_tensors"]) == ("model", 3)
    shapes = {entry["name"]: entry["shape"] for entry in told["tensors"]}
    assert shapes == {"a": [4], "b": None, "c": [2]}
    cut = catalogue.unpacked([catalogue.catalogue(first, is_cut=True)])
    assert {entry["shape"] for entry in cut["tensors"]} == {None}


def test_many_names_are_packed_and_dumped_in_pieces():
    known = {f"layers.{n}.weight": ((n, 2), "bfloat16") for n in range(5000)}
    pieces = catalogue.packed(known)
    assert len(pieces) == -(-5000 // catalogue.PIECE)
    told = catalogue.unpacked([{"of": "checkpoint", "pieces": pieces}])
    assert json.loads(catalogue.dumped(told)) == told
    none = catalogue.unpacked([{"of": "model", "pieces": []}])
    assert json.loads(catalogue.dumped(none)) == none
