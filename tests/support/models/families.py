"""Families of models, and which of them are proved elsewhere or not at all."""

from typing import Any

from tests.support.models.family import CORRECTED, EXPERTS, WINDOW, Family
from tests.support.models.state_spaces import STATE_SPACES

# The one size of a latent that vLLM's CPU kernel is compiled for.
LATENT = {
    "head_dim": None,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
}
BY_TRANSFORMERS = "vLLM has it by way of transformers"
MLA = "latent attention: two weights that loading derives"

FAMILIES: dict[str, Family] = STATE_SPACES | {
    "llama": Family("LlamaForCausalLM", ""),
    "qwen2": Family("Qwen2ForCausalLM", "biases", odd=("*.bias",)),
    "qwen3": Family("Qwen3ForCausalLM", "norms of queries and keys"),
    "mixtral": Family(
        "MixtralForCausalLM",
        "experts",
        fields={"num_local_experts": 4, "num_experts_per_tok": 2},
        odd=("*.gate.weight",),
    ),
    # Every token goes through every expert, so that no rounding tips a choice.
    "mixtral_unrouted": Family(
        "MixtralForCausalLM",
        "experts",
        fields={"num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "experts",
        fields={"num_experts": 8, "norm_topk_prob": True, **EXPERTS},
        odd=("*.gate.weight",),
    ),
    "bloom": Family("BloomForCausalLM", "ALiBi", odd=("*.bias",)),
    "mistral": Family(
        "MistralForCausalLM", "a sliding window", fields={"sliding_window": WINDOW}
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "sliding and global layers, capped logits",
        # vLLM has no other than this.
        fields={
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
        embedding=0.05,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "sliding and global layers of two ropes, a scaled embedding",
        config="Gemma3TextConfig",
        fields={
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 6,
        },
        embedding=0.05,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "a scale of each layer that is a buffer",
        config="Gemma4TextConfig",
        fields={
            "sliding_window": WINDOW,
            "global_head_dim": 64,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        odd=("*.layer_scalar",),
        embedding=0.05,
    ),
    "phi3": Family("Phi3ForCausalLM", "fused tensors in its checkpoint"),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "learned positions, transposed weights, a tied head",
        config="GPT2Config",
        fields={"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 2048},
        odd=("*.bias", "*wpe*"),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        BY_TRANSFORMERS,
        fields={"head_dim": None, "num_key_value_heads": None},
        odd=("*.bias",),
    ),
    "bert": Family(
        "BertModel",
        "an encoder, without KV",
        config="BertConfig",
        fields={"head_dim": None, "num_key_value_heads": None},
        odd=("*.bias",),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        CORRECTED,
        fields={"n_routed_experts": 4, "first_k_dense_replace": 1, **EXPERTS},
        odd=("*.e_score_correction_bias",),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        MLA,
        fields={"q_lora_rank": None, "topk_method": "greedy", **LATENT},
        odd=("*.kv_b_proj.weight",),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        f"{MLA}; {CORRECTED}",
        fields={"q_lora_rank": 48, "topk_method": "noaux_tc", **LATENT},
        odd=("*.e_score_correction_bias", "*.kv_b_proj.weight"),
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        f"{MLA}; {CORRECTED}",
        fields={"q_lora_rank": 48, **LATENT},
        odd=("*.e_score_correction_bias", "*.kv_b_proj.weight"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "experts in one tensor, written past their loaders; sinks",
        fields={
            "head_dim": 64,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        odd=("*.sinks", "*.bias", "*_bias"),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        "norms behind the layers, sliding and global",
        fields={"head_dim": None, "num_hidden_layers": 4, "sliding_window": WINDOW},
    ),
    "granite": Family("GraniteForCausalLM", "factors in its configuration"),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "shared experts behind a gate",
        fields={
            "head_dim": None,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            **EXPERTS,
        },
        odd=("*.gate.weight", "*.shared_expert_gate.weight", "*.bias"),
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        "attention and MLP side by side, a scaled head",
        fields={
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": Family("Glm4ForCausalLM", "four norms a layer", odd=("*norm*", "*.bias")),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        f"{CORRECTED}, which its loader renames",
        fields={
            "moe_intermediate_size": 64,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_layer_end_index": 1,
        },
        odd=("*.e_score_correction_bias", "*.gate.weight"),
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        "norms behind the layers",
        fields={"num_hidden_layers": 4, "sliding_window": WINDOW},
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        f"sliding and global layers; {CORRECTED}",
        fields={
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "num_experts": 4,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            **EXPERTS,
        },
        odd=("*.e_score_correction_bias", "*norm*"),
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "attention in chunks, layers without positions, one expert and a shared one",
        config="Llama4TextConfig",
        fields={
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        odd=("*.router.weight",),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        "norms of all queries and keys, experts",
        fields={"head_dim": None, "num_experts": 4, "num_experts_per_tok": 2},
        odd=("*.gate.weight", "*norm*"),
    ),
    "granite_moe": Family(
        "GraniteMoeForCausalLM",
        "experts, fused in its checkpoint",
        fields={"head_dim": None, "num_local_experts": 4, "num_experts_per_tok": 2},
        odd=("*.router.*",),
    ),
    "hunyuan_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        BY_TRANSFORMERS + "; experts",
        fields={"num_experts": 4, "moe_topk": 2},
    ),
    "hunyuan": Family("HunYuanDenseV1ForCausalLM", BY_TRANSFORMERS),
    "seed_oss": Family(
        "SeedOssForCausalLM", BY_TRANSFORMERS + "; biases", odd=("*.bias",)
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        BY_TRANSFORMERS + "; layers without positions",
        fields={"head_dim": None},
    ),
    "ministral3": Family("Ministral3ForCausalLM", "the text of Mistral 3"),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "rotary embeddings of pairs"),
    "gemma": Family("GemmaForCausalLM", "a scaled embedding", embedding=0.05),
    "nemotron": Family(
        "NemotronForCausalLM", "norms to which one is added, a squared ReLU"
    ),
}

WITHOUT_KERNELS = ("jamba", "falcon_mamba", "nemotron_h_moe")
"""vLLM's CPU build has none for the first Mamba, nor for experts without a gate."""

UNPROVED = ("bert", "bloom", "qwen3_next", *WITHOUT_KERNELS)
"""The first is refused, the second is for other tests, the third has none in a process
with others."""

LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Some of their layers have linear attention."""

CUT_UP = (
    *("deepseek_v3", "falcon_h1", "gemma3", "glm4_moe_lite", "gpt2"),
    *("granite_moe_hybrid", "jamba", "lfm2_moe", "llama4", "mamba2", "nemotron_h"),
    *("nemotron_h_moe", "phi3", "qwen2", "qwen3_5_moe", "qwen3_next"),
)
"""Of the ways in which loaders cut up for several ranks what they get, one each."""

WANT_TORCHVISION = ("qwen3_5", "qwen3_5_moe")
"""vLLM reads their classes in a file of models that see."""


def cpu_options(family: str) -> dict[str, str]:
    """Options of an engine of a family, on a CPU.

    On one with AMX latent attention packs weights of its own, and is refused.
    """
    is_latent = MLA in FAMILIES[family].particular
    return {"attention_backend": "CPU_MLA"} if is_latent else {}


def gpu_options(family: str) -> dict[str, Any]:
    """The same, on a GPU."""
    if MLA in FAMILIES[family].particular:
        return {"block_size": 64}  # what its kernels want
    if family in LINEAR:  # else vLLM takes FlashInfer's, installed or not
        return {"additional_config": {"gdn_prefill_backend": "triton"}}
    return {}
