"""Dropout of attention whose heads are divided over ranks: each draws for its own heads.

All other dropout falls on hidden states that all of these ranks have, and must be drawn alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.models.attention import attend_with, attention_function

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
