"""Model configs: the folder or file of model.name, and model.overrides."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file
from tests.fuzz.trees import spoil, spoil_text
from tests.fuzz.values import hostile, to_json, to_toml
from tests.two_ranks import SMALL_MODEL

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_SMALL,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {
        **_SMALL,
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": False,
        "layer_types": ["full_attention", "full_attention"],
    },
    "mixtral": {
        **_SMALL,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 512,
        "n_positions": 128,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
_TYPES = ("llama", "bert", "t5", "whisper", "clip", "mamba", "llava", "nothing", "LLAMA", "os", "")
# A repository that would run code of its own.
PAYLOAD = "import pathlib\npathlib.Path({marker!r}).touch()\n"
_AUTO_MAP = {
    "AutoConfig": "configuration_x.XConfig",
    "AutoModelForCausalLM": "modeling_x.XForCausalLM",
    "AutoTokenizer": "tokenization_x.XTokenizer",
}


def plant_code(place: Place, folder: str) -> None:
    """Python files that create the marker when they are imported."""
    for name in ("configuration_x", "modeling_x", "tokenization_x", "sitecustomize", "torch"):
        code = PAYLOAD.format(marker=str(place.marker))
        (place.folder / folder / f"{name}.py").write_text(code)


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """A folder with a config.json, or overrides; half of them trained for a step."""
    family = draw.choice([*FAMILIES])
    config = {"model_type": family, **deepcopy(FAMILIES[family])}
    folder = place.folder / "model"
    folder.mkdir()
    path, way = folder / "config.json", draw.randrange(12)
    words, note = [f"model.name={folder.name}"], "valid"
    if valid or way > 9:
        path.write_text(to_json(config))
    if valid:
        pass
    elif way < 5:
        note = spoil(draw, config)
        path.write_text(to_json(config), encoding="utf-8", errors="surrogatepass")
    elif way < 7:
        data, note = spoil_text(draw, to_json(config))
        path.write_bytes(data)
    elif way == 7:
        note = replace_file(draw, path)
    elif way == 8:  # code beside it, which nobody asked for
        config["auto_map"] = _AUTO_MAP
        config["model_type"] = draw.choice([family, "x", "custom"])
        config["custom_pipelines"] = {"text": {"impl": "modeling_x.X", "pt": ["AutoModel"]}}
        note = f"auto_map, as {config['model_type']}"
        path.write_text(to_json(config))
        plant_code(place, folder.name)
    elif way == 9:
        config["model_type"] = draw.choice(_TYPES)
        note = f"model_type {config['model_type']!r}"
        path.write_text(to_json(config))
    else:
        key, value = draw.choice([*config]), hostile(draw)
        word = f"model.overrides.{key}={to_toml(value)}".replace("\0", "")[:100_000]
        words.append(word)
        note = ascii(word)[:120]
    trained = draw.randrange(2) == 0
    if not trained:
        words.append("--dry-run")
    training = [word for word in place.training() if word not in SMALL_MODEL]
    return Case([*training, *words], f"{family}: {note}", valid=valid)
