"""Which checkpoint tensors fill a parameter, and what an unknown name meant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm.inflight.names import (
    checkpoint_names,
    describe_unknown,
    matcher,
    nearest,
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


def test_a_wrapped_model_meant_the_same_name_without_the_wrapper():
    name = "module.model.layers.0.self_attn.q_proj.weight"
    near = nearest(name, [8, 8], "bfloat16", MODEL)
    assert near[0] == "model.layers.0.self_attn.q_proj.weight"


def test_of_equal_suffixes_the_equal_shape_is_nearer_then_the_equal_dtype():
    near = nearest("final.weight", [8], "bfloat16", MODEL, most=2)
    assert near[0] == "model.norm.weight"
    assert MODEL[near[1]][1] == "bfloat16"


def test_a_name_that_is_like_nothing_has_no_neighbours():
    assert nearest("rotary", [3], "int8", MODEL) == []


@given(DOTTED, st.integers(0, 4))
def test_neighbours_are_known_names_and_not_too_many(name, most):
    near = nearest(name, None, None, MODEL, most=most)
    assert len(near) <= most
    assert set(near) <= MODEL.keys()


def test_a_refusal_names_every_unknown_tensor_with_its_neighbours():
    text = describe_unknown(
        [("x.norm.weight", [8], "float32"), ("rotary", [3], "int8")], MODEL
    )
    first, second = text.split("; ")
    assert first.startswith("x.norm.weight (nearest: model.norm.weight")
    assert second == "rotary"
