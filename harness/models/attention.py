"""transformers' attention functions by name, with document masks and sharded dropout.

Each rank draws the dropout of its own heads. All other dropout applies to hidden states that these
ranks share, so it must be drawn identically.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.config.own import ROWS
from harness.models import varlen

_PROBE, _KEYWORD = "probe", "of_the_model"


def attend_with(attention: str, model: nn.Module) -> None:
    """Make every attention module of a model use the function of this name in transformers."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = attention


def attention_function(attention: str, module: Any) -> Any:
    """Return the attention function of this name; "eager" is in the file of the module's family.

    `module`: an attention module, or a stand-in that has it as its `module`.
    """
    family = sys.modules[type(getattr(module, "module", module)).__module__]
    written_out: Any = getattr(family, "eager_attention_forward", None)
    if attention == "eager":
        return written_out
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention, written_out)


class _Reached(Exception):
    """Raised when a model's forward pass gets to a certain call, with its arguments."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.keywords = keywords


def _reach(*args: Any, **keywords: Any) -> Any:
    raise _Reached(*args, **keywords)


def takes_keywords(model: PreTrainedModel, weights: bool = False) -> bool:
    """Return True if a skeleton's attention gets its function from transformers and passes it the
    model's keywords. `weights`: attention may have parameters of its own, one per head.
    """
    reached = _reached(model, _PROBE, **{_KEYWORD: True})
    if reached is None:
        return False
    own = [*reached.args[0].parameters(recurse=False)]
    return _KEYWORD in reached.keywords and (weights or not own)


def separates_documents(model: PreTrainedModel) -> bool:
    """Return True if a skeleton's attention reads document boundaries from `position_ids`.

    Some architectures take no positions or ignore them in their mask: OPT, BLOOM, and Falcon before
    transformers 5.24.
    """
    with _documents_by(_reach):
        return _reached(model, "eager") is not None  # eager attention always takes a mask


def _reached(model: PreTrainedModel, attention: str, **keywords: Any) -> _Reached | None:
    """Return what a skeleton's forward pass with this attention raises; None for other errors, as
    meta tensors may raise anything.
    """
    ids = torch.tensor([[0, 1, 0, 1]], device="meta")
    before = model.config._attn_implementation
    attend_with(attention, model)
    try:
        model(input_ids=ids, position_ids=ids, use_cache=False, **keywords)
    except _Reached as reached:
        return reached
    except Exception:
        return None
    finally:
        attend_with(before, model)
    return None


# Without a mask function of the same name, models create no mask.
ALL_ATTENTION_FUNCTIONS.register("varlen", varlen.attend)
ALL_ATTENTION_FUNCTIONS.register(_PROBE, _reach)


def register_own(attention: str, values: Mapping[str, Any]) -> None:
    """Register an attention of run.code in transformers, with values of own.*, if it is one."""
    row = ROWS.get(("attention", attention))
    if row is not None:
        ALL_ATTENTION_FUNCTIONS.register(attention, row.bound(values))
        ALL_MASK_ATTENTION_FUNCTIONS.register(attention, _mask)


def _mask(*args: Any, **keywords: Any) -> Any:
    """Return the mask of sdpa, also where sdpa itself needs none."""
    skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **keywords | skips)


def separating(documents: bool) -> contextlib.AbstractContextManager[None]:
    """Within this context, attention is confined to the documents that `position_ids` number; with
    `documents` False, each row is one document.

    transformers would inspect the positions on the device and wait for the result.
    """
    return _documents_by(_numbered if documents else lambda position_ids: None)


@contextlib.contextmanager
def _documents_by(number: Callable[..., Any]) -> Iterator[None]:
    """Within this context, `number` replaces transformers' search for documents in positions."""
    utils: Any = masking_utils
    original = utils.find_packed_sequence_indices
    utils.find_packed_sequence_indices = number
    try:
        yield
    finally:
        utils.find_packed_sequence_indices = original


def _numbered(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the document number of each token in its row, (micro_batch, seq_len)."""
    before = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
"""Keys of a model config for the dropout probability of attention weights."""


def draw_by_place(model: PreTrainedModel, place: int) -> None:
    """Make this rank, one of several that each hold some of the heads, draw its attention dropout
    independently. Does nothing if there is no dropout.
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
    """Within this context, a rank draws from its own random stream; afterwards all ranks continue
    with the same one. The draws depend only on the generator's state, so a recomputed layer draws
    the same numbers. Never waits for the GPU.
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
