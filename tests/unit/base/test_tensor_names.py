"""Checkpoint tensors of a parameter, and similar names for an unknown one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.inflight.tensor_names import (
    Neighbours,
    checkpoint_names,
    describe_unknown,
    is_torn,
    matcher,
    nearest,
    paired,
    renaming,
    shared_suffix,
)

FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
MODEL = {
    "model.layers.0.self_attn.q_proj.weight": ([8, 8], "bfloat16"),
    "model.layers.0.self_attn.k_proj.weight": ([4, 8], "bfloat16"),
    "model.layers.1.self_attn.q_proj.weight": ([8, 8], "bfloat16"),
    "model.layers.0.mlp.down_proj.weight": ([8, 16], "bfloat16"),
    "model.norm.weight": ([8], "float32"),
}
DOTTED = st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(".".join)


def test_a_fused_parameter_is_filled_by_its_shards_in_order():
    assert checkpoint_names("model.layers.0.self_attn.qkv_proj.weight", FUSED) == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
    ]


@pytest.mark.parametrize(
    ("sent", "unsent", "is_so"),
    [
        ("m.layers.1.q m.norm", "m.layers.0.q m.embed", True),
        ("m.layers.0.q m.layers.1.k", "m.layers.0.k", True),
        ("m.layers.0.q m.norm", "m.embed", True),  # an engine has missed one call
        ("m.norm head", "m.layers.0.q m.embed", True),
        ("head", "m.layers.0.q m.embed m.norm", True),
        ("m.layers.0.experts.1.w", "m.layers.0.experts.0.w", True),
        ("h.1.a.q wte", "h.0.a.q", True),
        ("h.0.a.q", "wte", True),
        ("m.layers.0.q v.blocks.1.q", "v.blocks.0.q v.patch", True),
        ("l.m.layers.0.q", "v.blocks.0.q v.patch l.m.embed", True),
        ("m.layers.0.q m.norm", "v.blocks.0.q v.patch v.merger.mlp.0.w", False),
        ("m.l.layers.0.q", "m.v.blocks.0.q m.v.patch m.projector.w", False),
        ("m.layers.0.q m.norm", "head", False),
        ("m.norm", "head", False),
        ("m.norm", "", False),
        # A kind that no layer was sent of, as of buffers that a trainer has not.
        ("m.layers.0.q m.layers.1.q m.embed", "m.layers.0.b m.layers.1.b", False),
        ("m.layers.0.q m.layers.1.q", "m.layers.0.b m.layers.1.b m.embed", True),
        ("m.layers.1.a.q m.layers.2.a.q", "m.layers.0.dense.q", True),
        (
            "l.m.layers.0.q l.head",
            "v.e.layers.0.q v.embed p.0.weight p.1.weight",
            False,
        ),
        ("l.m.layers.0.q l.head p.0.w", "v.e.layers.0.q v.embed", False),
        # An embedding further up than its layers, as that of ChatGLM and of BERT.
        ("t.e.layers.0.q t.e.norm t.head", "t.embedding.words", True),
        ("t.e.layers.0.q", "t.embedding.words t.v.t.layers.0.q t.v.patch_embed", True),
        ("t.e.layers.0.q t.embedding.words", "t.v.t.layers.0.q t.v.patch_embed", False),
        ("t.e.layers.0.q t.embedding.words", "t.v.linear.w t.head", False),
        ("t.v.t.layers.0.q", "t.v.patch_embed t.e.layers.0.q t.embedding.words", True),
        ("l.m.layers.0.q", "v.m.e.layers.0.q v.m.embed.patch p.embed.w", False),
        ("m.l.layers.0.q m.v.blocks.0.q", "m.embed_vision.projection", False),
        ("m.layers.0.q m.embed", "draft.m.layers.0.q draft.m.embed draft.fc", False),
        ("m.layers.0.q draft.m.embed", "draft.m.layers.0.q draft.fc", True),
    ],
)
def test_a_version_is_torn_if_a_part_of_the_model_or_each_layer_lacks_tensors(
    sent: str, unsent: str, is_so: bool
) -> None:
    assert is_torn(sent.split(), unsent.split()) is is_so


def test_patterns_are_those_of_a_shell_over_whole_names():
    matches = matcher(["*.mlp.*", "lm_head.weight", "layers.[01].norm"])
    assert matches("layers.7.mlp.up_proj.weight") and matches("layers.1.norm")
    assert matches("lm_head.weight") and not matches("xlm_head.weight")
    assert not matches("layers.2.norm") and not matches("lm_head.weight.x")
    assert not matcher([])("")


def test_any_other_parameter_is_filled_by_its_namesake():
    for name in ("model.norm.weight", "qkv_proj_norm.weight", ""):
        assert checkpoint_names(name, FUSED) == [name]


@given(DOTTED, DOTTED)
def test_a_shared_suffix_is_what_two_names_end_in(a, b):
    count = shared_suffix(a, b)
    assert count == shared_suffix(b, a)
    assert shared_suffix(a, a) == len(a.split("."))
    if count:
        assert a.split(".")[-count:] == b.split(".")[-count:]


def test_the_nearest_name_of_a_wrapped_tensor_is_the_name_without_the_wrapper():
    name = "module.model.layers.0.self_attn.q_proj.weight"
    near = nearest(name, [8, 8], "bfloat16", MODEL)
    assert near[0] == "model.layers.0.self_attn.q_proj.weight"


def test_a_misspelt_name_is_matched_to_the_correct_one():
    norms = ("input_layernorm", "post_attention_layernorm")
    layers = {
        f"model.layers.{layer}.{norm}.weight": ([8], "float32")
        for layer in range(2)
        for norm in norms
    }
    for typed in ("model.nrom.weight", "model.norm.wieght", "model.norms.weight"):
        assert nearest(typed, [8], "float32", layers | MODEL) == ["model.norm.weight"]
    typed = "model.layers.1.input_layernrom.weight"
    assert nearest(typed, [8], "float32", layers | MODEL)[0] == (
        "model.layers.1.input_layernorm.weight"
    )


def test_equally_similar_names_are_ranked_by_shape_and_then_by_dtype():
    known = {
        "a.weight": ([4], "bfloat16"),
        "b.weight": ([8], "float32"),
        "c.weight": ([8], "bfloat16"),
    }
    assert nearest("d.weight", [8], "bfloat16", known) == [
        *("c.weight", "b.weight", "a.weight")
    ]


def test_a_similar_name_of_the_same_layer_ranks_first():
    near = nearest("model.layers.1.self_attn.q_prj.weight", None, None, MODEL)
    assert near[0] == "model.layers.1.self_attn.q_proj.weight"
    assert "model.layers.0.self_attn.q_proj.weight" not in near


def test_a_dissimilar_name_gets_no_suggestions():
    assert nearest("rotary", [3], "int8", MODEL) == []


@given(DOTTED, st.integers(0, 4))
def test_suggestions_are_known_names_up_to_a_maximum_number(name, most):
    near = nearest(name, None, None, MODEL, most=most)
    assert len(near) <= most
    assert set(near) <= MODEL.keys()


def test_a_rejection_names_every_unknown_tensor_with_its_neighbours():
    text = describe_unknown(
        [("x.norm.weight", [8], "float32"), ("rotary", [3], "int8")], MODEL
    )
    first, second = text.split("; ")
    assert first.startswith("x.norm.weight (nearest: model.norm.weight")
    assert second == "rotary"


# ------------------------------------------------------ what many have in common
DEEP = {
    **{
        f"model.layers.{layer}.{name}.weight": ([8, 8], "bfloat16")
        for layer in range(12)
        for name in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    },
    "model.embed_tokens.weight": ([16, 8], "bfloat16"),
    "model.norm.weight": ([8], "bfloat16"),
    "lm_head.weight": ([16, 8], "bfloat16"),
}
INNER = [name for name in DEEP if name.startswith("model.")]


@pytest.mark.parametrize(
    ("sent", "num_made"),
    [
        ([f"module.{name}" for name in DEEP], len(DEEP)),
        ([name.removeprefix("model.") for name in INNER], len(INNER)),
        ([name.replace("model.", "transformer.") for name in INNER], len(INNER)),
        ([name.replace("model.", "model.text.", 1) for name in INNER], len(INNER)),
        ([name.replace(".weight", ".base_layer.weight") for name in DEEP], len(DEEP)),
        ([f"{name}_orig" for name in DEEP], len(DEEP)),
        ([f"{name}.data" for name in DEEP], len(DEEP)),
        ([name.removesuffix(".weight") for name in DEEP], len(DEEP)),
        ([*(f"module.{name}" for name in DEEP), "something.else"], len(DEEP)),
    ],
)
def test_a_change_common_to_many_names_is_found_with_the_name_map_that_makes_the_change(
    sent, num_made
):
    found = renaming(sent, DEEP)
    assert found is not None
    change, made = found
    assert len(made) == num_made
    line = change.line()
    assert line is not None
    make = eval(line.removeprefix("name_map="))
    for name in made:
        assert make(name) == change(name)
        assert make(name) in DEEP
    assert repr(change.old)[1:-1] in str(change)
    assert repr(change.new)[1:-1] in str(change)


def test_the_line_leaves_the_names_alone_that_are_right_already():
    sent = [name.removeprefix("model.") for name in INNER]
    change, _ = renaming(sent, DEEP)
    line = change.line(kept=["lm_head.weight"])
    make = eval(line.removeprefix("name_map="))
    assert make("lm_head.weight") == "lm_head.weight"
    assert {make(name) for name in sent} == set(INNER)
    assert change.line(kept=DEEP) is None, "that would be no line"


def test_unrelated_names_have_no_change_in_common():
    assert renaming(["vision.patch.bias", "audio.conv.1.beta"], DEEP) is None
    assert renaming(["module.model.norm.weight"], DEEP) is None, "one is not many"
    assert renaming([], DEEP) is None


# ------------------------------------------------------------ a name for every one
def specs(named):
    return [(name, *fact) for name, fact in named.items()]


def test_every_tensor_is_paired_with_the_model_name_that_shares_its_ending():
    sent = {f"module.{name}": fact for name, fact in DEEP.items()}
    pairing = paired(specs(sent), DEEP)
    assert pairing.name_map == {f"module.{name}": name for name in DEEP}
    assert not pairing.ambiguous and not pairing.unmatched


def test_names_that_the_model_has_are_not_renamed_and_not_paired_with_others():
    sent = DEEP | {"other.norm.weight": ([8], "bfloat16")}
    pairing = paired(specs(sent), DEEP)
    assert pairing.name_map == {}
    assert pairing.unmatched == ["other.norm.weight"]


def test_a_tensor_of_another_shape_dtype_kind_or_suffix_is_not_paired():
    known = {"a.weight": ([8], "bfloat16"), "b.weight": ([4], "int8")}
    pairing = paired([("x.weight", [8], "float32")], known)
    assert pairing.name_map == {"x.weight": "a.weight"}
    assert paired([("x.weight", [4], "float32")], known).unmatched == ["x.weight"]
    assert paired([("x.bias", [8], "float32")], known).unmatched == ["x.bias"]


def test_a_shape_or_dtype_that_is_not_known_fits_any():
    known = {"a.weight": (None, None), "b.bias": ([4], None)}
    sent = [("x.weight", [8], "float32"), ("y.bias", [4], "int8")]
    assert paired(sent, known).name_map == {"x.weight": "a.weight", "y.bias": "b.bias"}


def test_the_dtype_decides_between_names_of_equal_ending_and_shape():
    known = {"a.weight": ([8], "bfloat16"), "b.weight": ([8], "float32")}
    assert paired([("x.weight", [8], "float32")], known).name_map == {
        "x.weight": "b.weight"
    }
    pairing = paired([("x.weight", [8], "float16")], known)
    assert pairing.ambiguous == {"x.weight": ["a.weight", "b.weight"]}


def test_two_tensors_that_match_one_name_equally_are_both_ambiguous():
    known = {"model.norm.weight": ([8], "bfloat16")}
    sent = [(f"{x}.norm.weight", [8], "bfloat16") for x in "xy"]
    pairing = paired(sent, known)
    assert pairing.name_map == {}
    assert pairing.ambiguous == {name: ["model.norm.weight"] for name, *_ in sent}
    # But one with a longer ending in common means it more.
    nearer = ("z.model.norm.weight", [8], "bfloat16")
    pairing = paired([*sent, nearer], known)
    assert pairing.name_map == {"z.model.norm.weight": "model.norm.weight"}
    assert pairing.unmatched == [name for name, *_ in sent]


@given(
    st.dictionaries(DOTTED, st.tuples(st.sampled_from([[1], [2]]), st.just("int8"))),
    st.dictionaries(DOTTED, st.tuples(st.sampled_from([[1], [2]]), st.just("int8"))),
)
def test_a_pairing_is_one_to_one_and_classifies_every_unknown_name(sent, known):
    pairing = paired(specs(sent), known)
    strange = {name for name in sent if name not in known}
    told = [*pairing.name_map, *pairing.ambiguous, *pairing.unmatched]
    assert sorted(told) == sorted(strange)
    meant = list(pairing.name_map.values())
    assert len(meant) == len(set(meant))
    assert set(meant) <= known.keys() - sent.keys()


@pytest.mark.seconds
def test_a_hundred_thousand_names_are_compared_in_seconds():
    known = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": ([8], "bfloat16")
        for layer in range(94)
        for expert in range(320)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    began = time.process_time()
    neighbours = Neighbours(known)
    for layer in range(12):
        typed = f"model.layers.{layer}.mlp.experts.7.gate_prj.weight"
        (near, *_) = neighbours.nearest(typed, [8], "bfloat16")
        assert near == typed.replace("prj", "proj")
    change, made = renaming([f"module.{name}" for name in known], known)
    assert change.old == "module" and len(made) == len(known)
    pairing = paired([(f"module.{n}", *fact) for n, fact in known.items()], known)
    assert len(pairing.name_map) == len(known)
    assert time.process_time() - began < 60
