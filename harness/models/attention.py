"""The attention functions of transformers by name, with documents and divided dropout.

Each rank draws the dropout of its own heads. All other dropout falls on hidden states that all of
these ranks have, and must be drawn alike.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
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


@contextlib.contextmanager
def separating(documents: bool) -> Iterator[None]:
    """Within this, models attend within the `documents` that `position_ids` number, or there are
    none to separate.

    transformers looks at positions on the device to see which, and waits for the answer.
    """
    utils: Any = masking_utils
    original = utils.find_packed_sequence_indices
    utils.find_packed_sequence_indices = _numbered if documents else _unnumbered
    try:
        yield
    finally:
        utils.find_packed_sequence_indices = original


def _numbered(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document in its row, (micro_batch, seq_len)."""
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


def _unnumbered(position_ids: torch.Tensor) -> None:
    """Return what masks of one document in each row are made of."""


ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
"""A model config's keys of the probability."""


def draw_by_place(model: PreTrainedModel, place: int) -> None:
    """Let a rank, one of several with some of the heads each, draw its attention's dropout by
    itself, if there is any.
    """
    if not any(getattr(model.config, key, 0) for key in ATTENTION_DROPOUTS):
        return
    attention = model.config._attn_implementation
    name = f"own_draws_{place}_{attention}"
    function: Any = functools.partial(_attend, attention, place)
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[attention])
    attend_with(name, model)


@contextlib.contextmanager
def own_draws(place: int, device: torch.device) -> Iterator[None]:
    """Within this, a rank draws numbers of its own; afterwards all go on alike, from further on.

    What is drawn follows from the generator's state alone: a layer that is computed again draws the
    same. On a GPU nothing waits.
    """
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(seed ^ (place + 1))
        generator.set_offset(offset)
        try:
            yield
        finally:
            offset = generator.get_offset()
            generator.manual_seed(seed)
            generator.set_offset(offset)
        return
    generator = torch.default_generator
    seed = int(torch.randint(2**62, (), generator=generator))
    state = generator.get_state()
    generator.manual_seed(seed + place)
    try:
        yield
    finally:
        generator.set_state(state)


def _attend(
    attention: str, place: int, module: Any, query: torch.Tensor, *args: Any, **keywords: Any
) -> Any:
    function = attention_function(attention, module)
    if not keywords.get("dropout"):
        return function(module, query, *args, **keywords)
    with own_draws(place, query.device):
        return function(module, query, *args, **keywords)
