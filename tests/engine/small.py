"""The small model of the engine's tests."""

from pathlib import Path
from typing import Any

SEQ_LEN = 16
VOCAB_SIZE = 64
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
_TINY: dict[str, Any] = {
    key: value for key, value in MODEL.items() if key not in ("model_type", "tie_word_embeddings")
}
EAGER = {"bloom", "gpt_oss", "mamba", "rwkv"}  # without sdpa
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True}
_FAMILIES: dict[str, dict[str, Any]] = {
    # Layers that return tuples, ALiBi, a norm after the embedding, tied weights.
    "bloom": {"n_head": 4, "n_layer": 3},
    "falcon": {"alibi": False},
    "gpt_neox": {},
    # Projections around the layers, learned positions with an offset.
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16, "dropout": 0.0},
    "phi3": {"pad_token_id": 0},
    "cohere": {"pad_token_id": 0},
    "granite": {"logits_scaling": 3.0, "pad_token_id": 0},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "qwen3_moe": {**_ROUTED, "num_experts": 4, "head_dim": 8},
    # Its first layer is dense: the first of two stages sends no router logits.
    "qwen2_moe": {
        **_ROUTED,
        "num_hidden_layers": 4,
        "mlp_only_layers": [0, 1, 3],
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
    # Reads the device of its embedding; every other layer is a mixture, attention is chunked.
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "pad_token_id": 0,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": 0,
    },
    "mamba": {"state_size": 4},
    # States that bypass all layers: refused.
    "rwkv": {},
}
_LATENT = {
    **_ROUTED,
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
}
_LATENT |= {"num_key_value_heads": 4, "pad_token_id": 0, "n_routed_experts": 4, "v_head_dim": 8}
_MIXTURE = {"num_experts_per_tok": 2, "pad_token_id": 0, "output_router_logits": True}
_MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "routed_scaling_factor": 2.5},
    "glm4_moe": {
        **_ROUTED,
        "pad_token_id": 0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "head_dim": 8,
    },
    "granitemoe": {**_MIXTURE, "num_local_experts": 4},
    "mixtral": {
        **_MIXTURE,
        "num_local_experts": 4,
        "router_jitter_noise": 0.0,
        "tie_word_embeddings": False,
    },
    "olmoe": {**_MIXTURE, "num_experts": 4},
}
FAMILIES = {name: {**_TINY, "model_type": name, **keys} for name, keys in _FAMILIES.items()}
# Families whose experts can be divided.
MIXTURES = {name: {**_TINY, "model_type": name, **keys} for name, keys in _MIXTURES.items()}
MIXTURES |= {name: FAMILIES[name] for name in ("gpt_oss", "qwen2_moe", "qwen3_moe")}
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": SEQ_LEN,
}
CONFIGS = {"llama": MODEL, "gpt2": _GPT2, **FAMILIES, **MIXTURES}


def run_config(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a run config of the model whose config.json is in `folder`."""
    config: dict[str, Any] = {
        "model": {"name": str(folder / "config.json")},
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch": 8, "micro_batch": 2, "steps": 100},
        "optim": {"warmup_steps": 0},
    }
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    return config
