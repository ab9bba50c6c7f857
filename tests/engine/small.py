"""The small model of the engine's tests."""

from pathlib import Path
from typing import Any

from tests.tables import beside

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
_TABLES = beside(__file__, "small.toml")
FAMILIES, MIXTURES = (
    {name: {**_TINY, "model_type": name, **keys} for name, keys in _TABLES[table].items()}
    for table in ("families", "mixtures")
)
# Families whose experts can be divided.
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
