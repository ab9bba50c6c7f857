"""The small models that the gates train, each with a property that could break."""

from typing import Any

Config = dict[str, Any]

VOCAB_SIZE = 128
SEQ_LEN = 32  # tokens


def _small(vocab_size: int) -> Config:
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return {"vocab_size": vocab_size, **ids, "max_position_embeddings": SEQ_LEN}


def _sizes(*sizes: int) -> Config:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip((*keys, "num_key_value_heads", "head_dim"), sizes, strict=True))


def _gpt2(vocab_size: int, hidden: int, heads: int, dropout: float) -> Config:
    sizes = {"n_embd": hidden, "n_layer": 2, "n_head": heads, "n_positions": SEQ_LEN}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return {**_small(vocab_size), "model_type": "gpt2", **sizes, **drops}


_DECODER = {
    **_small(VOCAB_SIZE),
    **_sizes(48, 96, 2, 4, 2, 12),
    "tie_word_embeddings": False,
    # Different from transformers' defaults for missing keys.
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}


def _decoder(model_type: str, **own: Any) -> Config:
    return {**_DECODER, "model_type": model_type, **own}


# Llama 3's, for an original length of eight tokens, so that most frequencies are changed.
_SCALED_ROTATION: Config = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0}
_SCALED_ROTATION |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED_ROTATION |= {"original_max_position_embeddings": 8}
_BALANCING = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
_FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}
LEARNED: dict[str, Config] = {
    "llama": _decoder("llama", rope_parameters=_SCALED_ROTATION),
    # Tied embeddings, biases, learned positions.
    "gpt2": dict(
        _gpt2(VOCAB_SIZE, 48, 4, 0.0), activation_function="gelu", layer_norm_epsilon=1e-3
    ),
    "qwen3": _decoder("qwen3"),
    # Experts, and a balancing loss that is not linear in the micro-batch.
    "mixtral": _decoder("mixtral", **_FOUR_EXPERTS, **_BALANCING),
}
"""Models of the parity gate."""
FLAT = tuple(LEARNED)
"""Models of the parity gate that every layout without stages trains."""
# States of less than a megabyte stay in memory; this model is wide enough that some are in files.
WIDE = "llama_wide"
LEARNED[WIDE] = {**LEARNED["llama"], "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# Models for pipeline stages: five layers, which neither two nor four stages share evenly.
_DEEP = {"num_hidden_layers": 5}
_TIED: Config = {"tie_word_embeddings": True}
PIPELINED: dict[str, Config] = {
    "llama_deep": _decoder("llama", **_DEEP),
    "llama_tied": _decoder(
        "llama", **_DEEP, **_TIED, attention_bias=True, mlp_bias=True, hidden_act="gelu"
    ),
    "qwen2": _decoder("qwen2", **_DEEP),
    "qwen3_deep": _decoder("qwen3", **_DEEP),
    "mistral": _decoder("mistral", **_DEEP, sliding_window=8),
    "gpt2_deep": {**LEARNED["gpt2"], "n_layer": 5},
    "mixtral_deep": {**LEARNED["mixtral"], **_DEEP},
    # Scaled embeddings, soft-capped logits and scores, every other layer slides.
    "gemma2": _decoder(
        "gemma2", **_DEEP, **_TIED, sliding_window=8, query_pre_attn_scalar=12, pad_token_id=0
    ),
    "olmo2": _decoder("olmo2", **_DEEP, pad_token_id=0),
}
LEARNED |= PIPELINED
# The architectures of the other presets, without stages: on two ranks, four micro-batches each.
PRESETS = ("gemma2", "olmo2", "qwen3_moe")
_EIGHT_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LEARNED["qwen3_moe"] = _decoder("qwen3_moe", **_EIGHT_EXPERTS, norm_topk_prob=True, **_BALANCING)
_NARROW = dict(_small(VOCAB_SIZE), hidden_size=48, num_hidden_layers=2, num_attention_heads=4)


def _narrow(model_type: str, **own: Any) -> Config:
    return {**_NARROW, "model_type": model_type, **own}


# More families under tensor parallelism: fused projections, transposed weights, biases that are
# added once, an embedding with its own width.
LEARNED |= {
    "phi3": _decoder("phi3", pad_token_id=0),
    # Without biases: a key bias has no gradient, so only noise would be compared.
    "opt": _narrow(
        "opt", ffn_dim=96, word_embed_proj_dim=48, enable_bias=False, dropout=0.0, pad_token_id=1
    ),
    "gpt_neox": _narrow("gpt_neox", intermediate_size=96, tie_word_embeddings=False),
    # Queries, keys and values interleaved by head; ALiBi.
    "bloom": dict(_small(VOCAB_SIZE), model_type="bloom", hidden_size=48, n_layer=2, n_head=4),
    # Two key heads for four query heads.
    "falcon": _narrow("falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon_alibi": _narrow("falcon", multi_query=False, parallel_attn=False, alibi=True),
}
DROPPING = "gpt2_dropping"
"""Drops hidden states that all tensor-parallel ranks hold; its attention drops nothing."""
LEARNED[DROPPING] = {**LEARNED["gpt2"], "resid_pdrop": 0.1, "embd_pdrop": 0.1}
HEAVY = "mixtral_heavy"
"""Its experts dominate the gradient: a norm without some of them is off by more than bf16."""
LEARNED[HEAVY] = dict(
    LEARNED["mixtral"], intermediate_size=1536, num_experts_per_tok=4, initializer_range=0.03
)
PLANTED = (DROPPING, HEAVY)
"""Models in which alone some defect shows: only the self-test and the full table train them."""
DIVIDED = (
    *("llama_tied", "qwen2", "mistral", "gemma2", "olmo2", "qwen3_moe", "phi3", "opt"),
    *("gpt_neox", "bloom", "falcon", "falcon_alibi"),
)
"""Models, besides FLAT, that the gate trains with tensor parallelism."""
# The others do not support document masks.
ROWS = tuple(name for name in DIVIDED if name.partition("_")[0] not in ("opt", "bloom", "falcon"))
"""Models, besides FLAT, that the gate trains with sequence parallelism."""
MIXTURES = ("mixtral", "qwen3_moe")
"""Models whose experts are divided."""
RECURRENT = ("lstm", "gru")
_HEAD = 64
_WIDTHS = ("hidden_size", "n_embd", "word_embed_proj_dim")
LEARNED |= {
    cell: {
        **_small(VOCAB_SIZE),
        "model_type": "recurrent",
        "cell": cell,
        "hidden_size": 48,
        "recurrent_size": 64,
        "num_hidden_layers": 5,
        "layer_norm_eps": 1e-3,
    }
    for cell in RECURRENT
}


def learned(architecture: str, device: str) -> Config:
    """Return a model of the parity gate. On a GPU its heads have 64 elements: fused attention does
    not support 12, and a cell would compare another kernel than real runs use.
    """
    config = LEARNED[architecture]
    if device == "cpu" or architecture in RECURRENT:
        return config
    if "head_dim" in config:
        return {**config, "head_dim": _HEAD}
    heads = config.get("num_attention_heads") or config["n_head"]
    return {**config, **{key: heads * _HEAD for key in _WIDTHS if key in config}}


# In fp16, transformers' own model gives NaN even in a plain loop: gemma2 in its first gradient,
# olmo2 after three steps, whatever the loss scale.
NOT_IN_FP16 = {"gemma2", "olmo2"}
# Only eager supports soft-capped scores and BLOOM's; sdpa for the rest.
ATTENTION = {"gemma2": "eager", "bloom": "eager"}

# Odd sizes: nothing divides by two ranks, so every share ends in padding or within a row.
_UNTIED = {"tie_word_embeddings": False}
# The balancing loss is not a sum over samples: another split would give another loss.
_UNBALANCED = {"model_type": "mixtral", **_FOUR_EXPERTS, "output_router_logits": False}
_ODD = {**_small(513), "model_type": "llama", **_sizes(45, 111, 2, 3, 1, 10)}
EVERYWHERE = "llama_tied"
"""Saved and loaded between all layouts; pipeline stages hold its tied weight twice."""
FROZEN, DROPOUT = "llama_frozen", "gpt2_dropout"
SHARED = "llama_shared"
"""Saved and loaded between tensor parallelism and other layouts: two ranks share its key head."""
MIXTURE = "mixtral_divided"
"""Saved and loaded between expert parallelism and other layouts."""
SAVED: dict[str, Config] = {
    "llama": {**_ODD, **_UNTIED},
    EVERYWHERE: {**_ODD, **_TIED},
    # Two untrained weights and two buffers of the model: see resume.py.
    FROZEN: {**_ODD, **_TIED},
    "mixtral": {
        **_ODD,
        **_UNTIED,
        **_UNBALANCED,
        "num_local_experts": 3,
        "hidden_size": 48,  # torch multiplies groups in rows of 16 bytes
        "intermediate_size": 104,
    },
    # Rows of 16 bytes for each of two tensor ranks.
    MIXTURE: {**_small(514), **_sizes(48, 112, 2, 4, 2, 10), **_UNTIED, **_UNBALANCED},
    SHARED: dict(
        _small(514) | _sizes(44, 110, 2, 4, 1, 10) | _TIED, model_type="llama", attention_bias=True
    ),
    DROPOUT: _gpt2(513, 45, 3, 0.1),
    WIDE: {**_ODD, **_sizes(270, 555, 2, 3, 1, 90), **_TIED},
}
"""Models of the round trips."""

MEASURED_AS = ("measured", "measured_mixture")
"""Models of the memory gate: dense, and with divided experts."""
_MEASURED: Config = {
    "model_type": "llama",
    "vocab_size": 1000,
    **_sizes(96, 250, 3, 6, 2, 16),
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MEASURED: dict[str, Config] = {
    "measured": _MEASURED,
    "measured_mixture": {
        **_MEASURED,
        "model_type": "mixtral",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
    },
}
