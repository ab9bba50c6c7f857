"""The small model of the engine's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
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


def run_config(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run config of that model, whose config.json lies in `folder`."""
    config: dict[str, Any] = {
        "model": {"name": str(folder / "config.json")},
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch": 8, "micro_batch": 2, "steps": 100},
        "optim": {"warmup_steps": 0},
    }
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    return config
