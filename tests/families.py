"""Families of models: what each takes to be made tiny, and what is particular of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

WINDOW = 64
"""Shorter than the tests' prompts and outputs together."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its class, of transformers and of vLLM.
        particular: what there is in it that is not in others.
        config: the class of its configuration; by default of the same stem.
        fields: of that, beside or instead of the common ones; None leaves one out.
        odd: patterns of tensors that are small and easily forgotten.
        embedding: a factor for the embedding; where it is scaled up again, a random
            model would else repeat its prompt.

    """

    architecture: str
    particular: str
    config: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    odd: tuple[str, ...] = ("*norm*",)
    embedding: float = 1.0

    def make(self, **common: Any) -> Any:
        """A random model of it, in float32."""
        stem = self.architecture.partition("For")[0]
        configure = getattr(transformers, self.config or f"{stem}Config")
        fields = {**common, **self.fields}
        given = {n: v for n, v in fields.items() if v is not None or n in KEPT}
        model = getattr(transformers, self.architecture)(configure(**given))
        model.get_input_embeddings().weight.data *= self.embedding
        return model


KEPT = ("bos_token_id", "q_lora_rank")
"""Fields for which None is a value."""

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
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
MLA = "latent attention: two weights that loading derives"
CORRECTED = "a router with a correction bias"

FAMILIES: dict[str, Family] = {
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
        "vLLM has it by way of transformers",
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
    "mamba2": Family(
        "Mamba2ForCausalLM",
        "a state space; a view of its convolution that is a buffer",
        fields={
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "num_attention_heads": None,
            "num_key_value_heads": None,
        },
        odd=("*.conv1d.*", "*.A_log", "*.D", "*.dt_bias"),
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        "Mamba and attention in every layer",
        fields={"mamba_d_ssm": 256, **SSM},
        odd=("*.conv1d.*", "*.A_log", "*.D", "*.dt_bias"),
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
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "layers of linear and of full attention, gated; shared experts",
        fields={
            "head_dim": 64,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            **EXPERTS,
        },
        odd=("*.conv1d.*", "*.A_log", "*.dt_bias"),
    ),
}

SEEING = {"Blip2ForConditionalGeneration": "a vision tower, also on its own"}
"""Made by tiny_vision.py."""

UNPROVED = ("bert", "bloom", "qwen3_next")
"""The first is refused, the second is for other tests, the third has none in a process
with others."""
