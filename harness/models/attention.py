"""The attention functions of transformers, by name, around which others are put."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.models import varlen

_PROBE, _KEYWORD = "probe", "of_the_model"


def attend_with(attention: str, model: nn.Module) -> None:
    """Let every attention of a model use the function that transformers knows by this name."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention


def attention_function(attention: str, module: Any) -> Any:
    """Return the function of a name; "eager" is written out in the file of the module's family.

    `module`: an attention, or what stands for one and has it as its `module`.
    """
    family = sys.modules[type(getattr(module, "module", module)).__module__]
    written_out: Any = getattr(family, "eager_attention_forward", None)
    if attention == "eager":
        return written_out
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention, written_out)


def takes_keywords(model: PreTrainedModel, weights: bool = False) -> bool:
    """Return whether the attention of a skeleton asks transformers for a function and hands it the
    model's keywords. `weights`: it may have some of its own, one for each head.
    """
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    attention = model.config._attn_implementation
    attend_with(_PROBE, model)
    try:
        model(input_ids=ids, position_ids=ids, use_cache=False, **{_KEYWORD: True})
    except _Reached as reached:
        own = [*reached.module.parameters(recurse=False)]
        return _KEYWORD in reached.keywords and (weights or not own)
    except Exception:  # whatever tensors without values lead to: it has another attention
        return False
    finally:
        attend_with(attention, model)
    return False


class _Reached(Exception):
    """Raised in place of the first attention of a model, with what was asked."""

    def __init__(self, module: nn.Module, *_: Any, **keywords: Any) -> None:
        super().__init__()
        self.module, self.keywords = module, keywords


def _reach(*args: Any, **keywords: Any) -> Any:
    raise _Reached(*args, **keywords)


# Without mask functions of these names, models make no mask by themselves.
ALL_ATTENTION_FUNCTIONS.register("varlen", varlen.attend)
ALL_ATTENTION_FUNCTIONS.register(_PROBE, _reach)
