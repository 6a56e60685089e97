"""The data of an update: labels, manifests, modes, phases and their changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.inflight import errors
from vllm.inflight.errors import BY_CODE, EngineFault, InflightError, Malformed
from vllm.inflight.update import (
    ACTIVE,
    MAX_LABEL_CHARS,
    MOVES,
    Manifest,
    PauseMode,
    Phase,
    TensorSpec,
    Version,
    check_label,
    fingerprint,
    renamer,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
SPECS = st.builds(
    TensorSpec,
    st.text(min_size=1, max_size=8),
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    st.sampled_from(["bfloat16", "float32"]),
    st.none() | st.text("0123456789abcdef", min_size=32, max_size=32),
)
ENTRY = {"name": "w", "shape": [2, 3], "dtype": "bfloat16"}


def manifest(*entries: Any, **fields: Any) -> dict[str, Any]:
    return {"format": 1, "tensors": list(entries)} | fields


# Manifests


@given(
    st.lists(SPECS, unique_by=lambda spec: spec.name, max_size=5),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.lists(st.text(min_size=1, max_size=8), max_size=3),
)
def test_a_manifest_round_trips_through_json(specs, step, subset):
    sent = Manifest.of(specs, step=step, subset=subset)
    assert Manifest.parse(json.loads(json.dumps(sent.to_dict()))) == sent


def test_a_dtype_may_carry_torchs_prefix():
    parsed = Manifest.parse(manifest(ENTRY | {"dtype": "torch.bfloat16"}))
    assert parsed.tensors["w"] == TensorSpec("w", (2, 3), "bfloat16")


@pytest.mark.parametrize(
    "body, named",
    [
        (None, '"format": 1'),
        ([], '"format": 1'),
        ({}, '"format": 1'),
        ({"format": 2}, '"format": 1'),
        ({"format": "1"}, '"format": 1'),
        (manifest(tensors={}), "'tensors'"),
        (manifest("w"), "tensor #0"),
        (manifest(ENTRY, {"shape": [1], "dtype": "int8"}), "tensor #1: 'name'"),
        (manifest(ENTRY | {"name": ""}), "'name'"),
        (manifest(ENTRY | {"name": 3}), "'name'"),
        (manifest(ENTRY | {"shape": "2x3"}), r"\(w\): 'shape'"),
        (manifest(ENTRY | {"shape": [2, -3]}), r"\(w\): 'shape'"),
        (manifest(ENTRY | {"shape": [2.0, 3]}), r"\(w\): 'shape'"),
        (manifest(ENTRY | {"shape": [True]}), r"\(w\): 'shape'"),
        (manifest(ENTRY | {"dtype": None}), r"\(w\): 'dtype'"),
        (manifest(ENTRY | {"digest": "F" * 32}), r"\(w\): 'digest'"),
        (manifest(ENTRY | {"digest": "0" * 31}), r"\(w\): 'digest'"),
        (manifest(ENTRY | {"digest": 0}), r"\(w\): 'digest'"),
        (manifest(ENTRY, ENTRY), "'w' twice"),
        (manifest(step="3"), "'step'"),
        (manifest(step=True), "'step'"),
        (manifest(step=1 << 63), "'step'"),
        (manifest(ENTRY | {"name": "w" * 513}), "1 to 512"),
        (manifest(ENTRY | {"shape": [1 << 63]}), "'shape'"),
        (manifest(ENTRY | {"shape": [1] * 17}), "'shape'"),
        (manifest(*[0] * (1 + (1 << 20))), "'tensors' must be a list of up to"),
        (manifest(name_map=[1]), "'name_map'"),
        (manifest(name_map={"a": 1}), "'name_map'"),
        (manifest(name_map={"a": "w", "b": "w"}), "'name_map' maps two"),
        (manifest(subset=[]), "subset must be a list of 1 to 1024"),
        (manifest(subset="*"), "subset must be a list"),
        (manifest(subset=["*"] * 1025), "subset must be a list of 1 to 1024"),
        (manifest(subset=["w", 3]), "a pattern of a subset must be a string.*3"),
        (manifest(subset=[""]), "a pattern of a subset must be a string of 1 to 512"),
        (manifest(subset=["w" * 513]), "a pattern of a subset .* 1 to 512"),
        (manifest(base="0" * 31), "'base' must be the digest"),
        (manifest(base=7), "'base' must be the digest"),
        (manifest(base="0" * 32, subset=["w"]), "either 'base' or 'subset'"),
        (manifest(ENTRY, base="0" * 32), "a delta must announce the 'digest'"),
        (manifest(base="0" * 32), "must name a tensor"),
        (manifest(draft=1), "'draft' must be true or false"),
    ],
)
def test_a_manifest_that_is_wrong_is_rejected_by_the_entry(body, named):
    with pytest.raises(Malformed, match=named):
        Manifest.parse(body)


@given(
    JSON | st.builds(lambda tensors: {"format": 1, "tensors": tensors}, JSON),
    st.dictionaries(
        st.sampled_from(
            ["name", "shape", "dtype", "digest", "step", "name_map", "subset"]
        ),
        JSON,
    ),
)
def test_hostile_json_is_either_parsed_or_rejected(body, entry):
    for candidate in (body, manifest(entry), manifest(ENTRY, **entry)):
        try:
            parsed = Manifest.parse(candidate)
        except Malformed:
            continue
        assert Manifest.parse(parsed.to_dict()) == parsed


def test_a_manifest_contains_the_models_names_after_the_name_map():
    specs = [TensorSpec("module.w", (1,), "int8")]
    assert list(Manifest.of(specs, name_map={"module.w": "w"}).tensors) == ["w"]
    cut = Manifest.of(specs, name_map=lambda name: name.removeprefix("module."))
    assert list(cut.tensors) == ["w"]
    assert renamer({"a": "b"})("c") == "c"


def test_two_tensors_that_get_one_name_are_rejected():
    specs = [TensorSpec(name, (1,), "int8") for name in ("a", "b")]
    with pytest.raises(Malformed, match="'w'"):
        Manifest.of(specs, name_map=lambda _: "w")


# Labels, versions, bodies


@pytest.mark.parametrize("label", ["1", "step-12", "ε\n\x1f ", "x" * MAX_LABEL_CHARS])
def test_a_label_is_any_string(label):
    assert check_label(label) == label


def test_a_missing_label_is_valid():
    assert check_label(None) is None


@pytest.mark.parametrize("label", ["", 3, True, ["a"], "x" * (MAX_LABEL_CHARS + 1)])
def test_invalid_labels_are_rejected(label):
    with pytest.raises(Malformed, match="weight_version"):
        check_label(label)


def test_the_start_weights_have_the_default_label_and_no_digest():
    assert Version().to_dict() == {
        "weight_version": "default",
        "epoch": 0,
        "digest": None,
        "step": None,
        "committed_at": None,
    }


def test_bodies_are_equal_whatever_the_order_of_their_fields():
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": [1, 2]}) != fingerprint({"a": [2, 1]})


# Modes and phases


@pytest.mark.parametrize("mode", PauseMode)
def test_every_mode_is_read_by_its_name(mode):
    assert PauseMode.parse(mode.value) is mode


def test_upstreams_pause_mode_keep_means_in_place():
    assert PauseMode.parse("keep") is PauseMode.IN_PLACE


@pytest.mark.parametrize("mode", ["", "KEEP", "stop", 3, None, ["abort"], {}])
def test_an_unknown_mode_is_rejected_with_the_known_ones(mode):
    with pytest.raises(Malformed) as refusal:
        PauseMode.parse(mode)
    assert "in_place, retract, abort, wait (or keep)" in str(refusal.value)


def test_every_phase_has_an_entry_in_the_transition_table():
    assert MOVES.keys() == set(Phase)


def test_an_active_update_can_be_aborted_and_an_ended_one_cannot():
    assert {p for p, to in MOVES.items() if Phase.ABORTED in to} == ACTIVE


def test_only_a_staged_update_commits_and_only_a_committed_one_rolls_back():
    sources = {to: {p for p, moves in MOVES.items() if to in moves} for to in Phase}
    assert sources[Phase.COMMITTED] == {Phase.STAGED, Phase.ROLLED_BACK}
    assert sources[Phase.ROLLED_BACK] == {Phase.COMMITTED}
    assert sources[Phase.OPEN] == set()


def test_an_aborted_update_is_final_and_a_rolled_back_one_can_only_be_committed():
    assert not MOVES[Phase.ABORTED]
    assert MOVES[Phase.ROLLED_BACK] == {Phase.COMMITTED}


def test_every_phase_can_be_reached_and_only_a_rollback_leads_back():
    seen, ahead = set(), [Phase.OPEN]
    while ahead:
        phase = ahead.pop()
        seen.add(phase)
        assert phase is Phase.ROLLED_BACK or not MOVES[phase] & (seen - {Phase.ABORTED})
        ahead += MOVES[phase] - seen
    assert seen == set(Phase)


# Errors, which travel as data


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.code)
def test_an_error_round_trips_through_json_with_its_type_and_facts(kind):
    sent = kind("why", tensors=["a", "b"], phase="staging", update_id="u")
    got = InflightError.from_dict(json.loads(json.dumps(sent.to_dict())))
    assert type(got) is kind
    assert got.to_dict() == sent.to_dict()
    assert 400 <= kind.status < 600
    assert kind.remedy.endswith(".")


@pytest.mark.parametrize(
    ("sent", "facts"),
    [
        (errors.OutOfDeviceMemory("no room", missing_bytes=7 << 30), "missing_bytes"),
        (errors.TooManyUpdates("slower", retry_after_s=3), "retry_after_s"),
        (errors.ArenaFault("no", call="cuMemMap", driver_code=2), "call driver_code"),
    ],
)
def test_fields_of_an_error_survive_serialisation(sent, facts):
    got = InflightError.from_dict(json.loads(json.dumps(sent.to_dict())))
    for fact in facts.split():
        assert getattr(got, fact) == getattr(sent, fact)


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.code)
def test_every_error_keeps_its_remedy_when_serialised(kind):
    assert kind("why").to_dict()["remedy"] == kind.remedy
    own = kind("why", remedy="Do this.")
    assert own.to_dict()["remedy"] == "Do this."
    assert InflightError.from_dict(own.to_dict()).remedy == "Do this."
    assert InflightError.from_dict({"code": kind.code}).remedy == kind.remedy


@pytest.mark.parametrize("cause", errors.Cause)
def test_a_rejection_with_one_cause_has_the_remedy_of_that_cause(cause):
    assert errors.CAUSES.keys() == set(errors.Cause)
    what, remedy = errors.CAUSES[cause]
    assert what.endswith(".") and remedy.endswith(".")
    error = errors.WeightsMismatch("why", named={cause: ["a", "b"]})
    assert (error.remedy, error.tensors) == (remedy, ["a", "b"])
    body = error.to_dict()
    assert body["causes"] == {cause: 2}
    assert InflightError.from_dict(body).to_dict() == body


def test_each_remedy_of_several_causes_names_its_cause():
    named = {"missing": ["a"], "not_finite": ["b"]}
    remedy = errors.WeightsMismatch("why", named=named).remedy
    assert remedy == (
        f"not finite: {errors.CAUSES['not_finite'][1]} "
        f"missing: {errors.CAUSES['missing'][1]}"
    )


def test_an_unknown_field_of_a_serialised_error_is_ignored():
    got = InflightError.from_dict({"code": "malformed", "message": "", "call": "x"})
    assert not hasattr(got, "call")


def test_an_error_of_an_unknown_kind_stays_readable():
    got = InflightError.from_dict({"code": "from_the_future", "message": "why"})
    assert type(got) is EngineFault
    assert str(got) == "why"


def test_a_long_list_of_tensors_is_cut_and_counted():
    body = InflightError("why", tensors=[str(n) for n in range(100)]).to_dict()
    assert (len(body["tensors"]), body["num_tensors"]) == (64, 100)
    again = InflightError.from_dict(body)  # as often as it crosses processes
    assert again.num_tensors == again.to_dict()["num_tensors"] == 100


def test_names_in_the_manifest_of_a_drafter_have_its_prefix_once():
    parsed = Manifest.parse(
        manifest(draft=True, subset=["fc.*"], name_map={"head": "draft.lm_head"})
    )
    assert all(name == f"draft.{name[6:]}" for name in parsed.tensors)
    assert all(spec.name == name for name, spec in parsed.tensors.items())
    assert parsed.subset == ("draft.fc.*",)
    assert parsed.model_name("fc.weight") == "draft.fc.weight"
    assert parsed.model_name("draft.fc.weight") == "draft.fc.weight"
    assert parsed.model_name("head") == "draft.lm_head"
    assert Manifest.parse(parsed.to_dict()) == parsed
