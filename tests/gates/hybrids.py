"""Small models of every text family in transformers with states, convolutions or linear layers."""

from typing import Any

Config = dict[str, Any]

_SIZES: Config = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
}
_HEADS = dict(_SIZES, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
_HEADS["max_position_embeddings"] = 64
_EXPERTS = dict(_HEADS, num_experts_per_tok=2, moe_intermediate_size=16)
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_CONVOLVED = {"layer_types": ["conv", "full_attention"]}
_SCAN = dict(  # Mamba-2's, within another model
    _HEADS, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8, mamba_d_conv=4
)
_DELTA = dict(_MIXED, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SHARED = dict(_EXPERTS | _DELTA, num_experts=4, shared_expert_intermediate_size=16)
_LATENT = dict(_EXPERTS | _MIXED, num_key_value_heads=4, num_local_experts=4)
_LATENT |= {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1}
_LATENT |= dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
_INKLING = dict(_EXPERTS, layer_types=["hybrid_sliding", "hybrid"], n_routed_experts=4)
_INKLING |= dict.fromkeys(("head_dim", "swa_head_dim", "sliding_window_size"), 8)
_INKLING |= dict.fromkeys(("swa_num_attention_heads", "d_rel", "rel_extent"), 4)
_INKLING |= {"swa_num_key_value_heads": 2, "rel_extent": 16}
HYBRIDS: dict[str, Config] = {
    "mamba": dict(_SIZES, state_size=4),
    "mamba2": dict(_SIZES, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
    "falcon_mamba": dict(_SIZES, state_size=4),
    "rwkv": _SIZES,
    "xlstm": dict(_SIZES, num_heads=4, chunk_size=8, mode="train"),
    "recurrent_gemma": dict(_HEADS, num_hidden_layers=3, attention_window_size=8, lru_width=32),
    "falcon_h1": dict(_SCAN, mamba_d_ssm=64),
    "bamba": dict(_SCAN, attn_layer_indices=[1]),
    "granitemoehybrid": dict(_SCAN | _MIXED, num_local_experts=4, shared_intermediate_size=32),
    "jamba": dict(_HEADS, num_experts=4, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1),
    "zamba": dict(
        _HEADS,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=4,
        num_key_value_heads=4,
        mamba_dt_rank=2,
    ),
    "zamba2": dict(
        _HEADS,
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        num_key_value_heads=4,
        chunk_size=8,
    ),
    "nemotron_h": dict(
        _EXPERTS,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=16,
    ),
    "minimax": dict(_HEADS | _MIXED, num_local_experts=4, block_size=8, head_dim=8),
    "lfm2": _HEADS | _CONVOLVED,
    "lfm2_moe": dict(_EXPERTS | _CONVOLVED, num_experts=4, num_dense_layers=1),
    "lfm3": dict(_HEADS | _CONVOLVED, head_dim=8),
    "qwen3_next": _SHARED,
    "qwen3_5_text": _HEADS | _DELTA,
    "qwen3_5_moe_text": _SHARED,
    "qwen4_exp_text": dict(
        _SHARED,
        hc_count=2,
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "olmo_hybrid": _HEADS | _DELTA,
    "zaya": dict(_EXPERTS, num_experts_per_tok=1, head_dim=8, num_experts=4, router_hidden_size=16),
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
    "kimi_linear": dict(_LATENT, linear_head_dim=8, linear_num_heads=4),
    "bailing_hybrid": dict(_LATENT, head_dim=8),
}
HYBRIDS = {name: {"model_type": name, **config} for name, config in HYBRIDS.items()}
_ROUTED = dict(
    _EXPERTS, head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
)
NEWER: dict[str, Config] = {
    "apertus1p5_text": _HEADS,
    "beam": dict(
        _EXPERTS, head_dim=8, num_experts=4, n_group=1, topk_group=1, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
    ),
    "dory": dict(
        _HEADS, num_hidden_layers=3, head_dim=8, sliding_window=8, n_input_layers=1,
        n_output_layers=1, layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "dots3_note_text": dict(
        _LATENT, layer_types=None, n_routed_experts=4, q_lora_rank=8, n_shared_experts=1
    ),
    "exaone": _HEADS,
    "flint": dict(
        _EXPERTS, head_dim=8, num_experts=4, shared_expert_intermediate_size=16, sliding_window=8
    ),
    "inkling2_loop_text": dict(
        _INKLING, num_hidden_layers=3, layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        unpadded_vocab_size=512, n_layers_per_attn_res_block=1, loop_layer_index_start=1,
        loop_layer_index_end=2, loop_num_passes=2, loop_gate_rank=4,
    ),
    "internlm3": dict(_HEADS, head_dim=8),
    "iquestcoder": dict(_HEADS, head_dim=8),
    "lara_mini": dict(_SHARED, sliding_window=8),
    "sarvam_mla": dict(_LATENT | _ROUTED, num_key_value_heads=4, q_lora_rank=8),
    "sarvam_moe": dict(_ROUTED, n_shared_experts=1),
}  # fmt: skip
NEWER = {name: {"model_type": name, **config} for name, config in NEWER.items()}
"""Additional decoders that came with transformers 5.21 to 5.24."""
