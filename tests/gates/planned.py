"""Small models of every family with a tensor-parallel plan; they have grouped key heads and
windows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from harness.layout.families import SIZE_KEYS, family_of
from harness.layout.tensor import EXPERTS, TensorPlan, tensor_plan, without_sdpa
from harness.models.skeleton import hf_config

SEQ_LEN, VOCAB_SIZE = 24, 96
_SIZES = {
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head": 8,
    "width": 64,
    "positions": 64,
    "experts": 4,
}
_COMMON = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "vocab_size": VOCAB_SIZE,
    "sliding_window": 8,  # shorter than a row
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "use_cache": False,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "n_shared_experts": 1,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
# Keys that a family requires, by its own names.
_OWN: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
"""For families whose keys and values are projected from few dimensions (kv_lora_rank)."""


def families() -> list[str]:
    """Return the causal language model families with a plan, by transformers or by the harness."""
    types = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    return sorted(name for name in types if family_of(name).tensor_plan or tensor_plan(name))


def tiny(family: str) -> tuple[dict[str, Any], PreTrainedModel]:
    """Return a small fp32 model, whose weights reveal a lost bias or norm, and its config.

    Raises transformers' error if these sizes do not fit the family.
    """
    default = CONFIG_MAPPING[family]()
    values: dict[str, Any] = {"model_type": family}
    for size, keys in SIZE_KEYS.items():
        values |= {key: _SIZES[size] for key in keys if _has(default, key)}
    values |= {key: value for key, value in _COMMON.items() if _has(default, key)}
    values |= {key: 0.0 for key in vars(default) if key.endswith(("dropout", "pdrop", "jitter"))}
    values |= _LATENT if "kv_lora_rank" in values else {}
    values |= _OWN.get(family, {})
    config = hf_config(copy.deepcopy(values))
    torch.manual_seed(0)
    attention = "eager" if without_sdpa(family) else "sdpa"
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.eval()  # disables dropout
    return {**config.to_dict(), **values}, model


def is_mixture(values: dict[str, Any], model: PreTrainedModel) -> bool:
    """Return True if the model has experts that its plan divides."""
    plan = TensorPlan.of(values)
    return any(plan.style_of(name) == EXPERTS for name, _ in model.named_modules())


def _has(config: PreTrainedConfig, key: str) -> bool:
    return key in vars(config) or key in getattr(config, "attribute_map", {})
