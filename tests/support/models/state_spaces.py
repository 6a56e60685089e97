"""Families with a state beside KV: Mamba, short convolutions, linear attention."""

from tests.support.models.family import CORRECTED, EXPERTS, Family

SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
STATES = ("*.conv1d.*", "*.A_log", "*.D", "*.dt_bias")
FIRST_STATES = ("*.conv1d.*", "*.A_log", "*.D", "*.dt_proj.*")
"""What is odd in Mamba's second version, and in its first."""

GATED = "layers of linear and of full attention, gated"
LINEAR = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 64, **EXPERTS}
LINEAR_STATES = ("*.conv1d.*", "*.A_log", "*.dt_bias")

NEMOTRON = {
    "num_hidden_layers": None,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "use_mamba_kernels": False,
}

STATE_SPACES: dict[str, Family] = {
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
        odd=STATES,
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        "Mamba and attention in every layer",
        fields={"mamba_d_ssm": 256, **SSM},
        odd=STATES,
    ),
    "granite_moe_hybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "Mamba, attention and experts, fused in its checkpoint",
        fields={
            "head_dim": None,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            **SSM,
        },
        odd=(*STATES, "*.router.*"),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        "layers of one thing each: Mamba, attention, MLP",
        fields={
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            **NEMOTRON,
        },
        odd=STATES,
    ),
    "nemotron_h_moe": Family(
        "NemotronHForCausalLM",
        f"layers of one thing each: Mamba, attention, experts; {CORRECTED}",
        fields={
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 64,
            **EXPERTS,
            **NEMOTRON,
        },
        odd=(*STATES, "*e_score_correction_bias"),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        "short convolutions",
        fields={
            "head_dim": None,
            "layer_types": ["conv", "full_attention"],
            "tie_word_embeddings": True,
            # vLLM wants these; transformers' class has them no more.
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 32,
        },
        odd=("*.conv.conv.*", "*norm*"),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        f"short convolutions; {CORRECTED}",
        fields={
            "head_dim": None,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "num_dense_layers": 2,
            "num_experts": 4,
            "tie_word_embeddings": True,
            **EXPERTS,
        },
        odd=("*.conv.conv.*", "*.gate.*", "*bias*"),
    ),
    "jamba": Family(
        "JambaForCausalLM",
        "the first Mamba, attention and experts",
        fields={
            "head_dim": None,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        odd=FIRST_STATES,
    ),
    "falcon_mamba": Family(
        "FalconMambaForCausalLM",
        "the first Mamba",
        fields={
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "head_dim": None,
            "time_step_rank": 8,
        },
        odd=FIRST_STATES,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        f"{GATED}; shared experts",
        fields=LINEAR | SHARED,
        odd=LINEAR_STATES,
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM",
        GATED,
        config="Qwen3_5TextConfig",
        fields=LINEAR,
        odd=LINEAR_STATES,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        f"{GATED}; shared experts",
        config="Qwen3_5MoeTextConfig",
        fields=LINEAR | SHARED,
        odd=LINEAR_STATES,
    ),
}
