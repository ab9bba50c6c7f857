"""The small model of the engine's tests."""

from pathlib import Path
from typing import Any

from tests.tables import beside

EAGER = {"bloom", "gpt_oss", "mamba", "rwkv"}  # without sdpa
_TABLES = beside(__file__, "small.toml", with_parts=True)
MODEL: dict[str, Any] = _TABLES["llama"]
LARGER, DBRX = _TABLES["larger"], _TABLES["dbrx"]
SEQ_LEN: int = MODEL["max_position_embeddings"]
VOCAB_SIZE: int = MODEL["vocab_size"]
FAMILIES, MIXTURES, BIASED = (
    {name: {**_TABLES["parts"]["tiny"], "model_type": name, **keys} for name, keys in table.items()}
    for table in (_TABLES["families"], _TABLES["mixtures"], _TABLES["biased"])
)
# Families whose experts can be divided.
MIXTURES |= {name: FAMILIES[name] for name in ("gpt_oss", "qwen2_moe", "qwen3_moe")}
CONFIGS = {"llama": MODEL, "gpt2": _TABLES["gpt2"], **FAMILIES, **MIXTURES}


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
