"""The small models that the gates train, each with a property that could break (models.toml)."""

from typing import Any

from tests.tables import beside

Config = dict[str, Any]

_TABLES = beside(__file__, "models.toml", with_parts=True)
VOCAB_SIZE: int = _TABLES["parts"]["small"]["vocab_size"]
SEQ_LEN: int = _TABLES["parts"]["small"]["max_position_embeddings"]
PIPELINED: dict[str, Config] = _TABLES["pipelined"]
LEARNED: dict[str, Config] = {**_TABLES["flat"], **_TABLES["wide"], **PIPELINED, **_TABLES["more"]}
"""Models of the parity gate."""
FLAT = tuple(_TABLES["flat"])
"""Models of the parity gate that every layout without stages trains."""
WIDE = "llama_wide"
# The architectures of the other presets, without stages: on two ranks, four micro-batches each.
PRESETS = ("gemma2", "olmo2", "qwen3_moe")
DROPPING, HEAVY = "gpt2_dropping", "mixtral_heavy"
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

EVERYWHERE = "llama_tied"
"""Saved and loaded between all layouts; pipeline stages hold its tied weight twice."""
FROZEN, DROPOUT = "llama_frozen", "gpt2_dropout"
SHARED = "llama_shared"
"""Saved and loaded between tensor parallelism and other layouts: two ranks share its key head."""
MIXTURE = "mixtral_divided"
"""Saved and loaded between expert parallelism and other layouts."""
SAVED: dict[str, Config] = _TABLES["saved"]
"""Models of the round trips."""

MEASURED: dict[str, Config] = _TABLES["measured"]
"""Models of the memory gate: dense, and with divided experts."""
MEASURED_AS = tuple(MEASURED)
