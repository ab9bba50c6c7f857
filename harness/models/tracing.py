"""Bytes that a decoder's own class saves for backward, traced on fake tensors without weights.

The model is traced with one layer of each kind, in the order of the config, and then once per kind
with that layer twice. Attention dropout is disabled, because with it a CPU computes attention
differently from a GPU. Flash attention and varlen save the same tensors as sdpa.

As a command, it reads a request as JSON and prints the model's shape and the bytes of its layers,
so that a plan need not import torch: python -m harness.models.tracing < request.json
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from harness.estimate.inputs import BY_REFERENCE, WITH_KERNELS, Way
from harness.models import state_kernels
from harness.models.loss import PLAIN, LossSetup, forward
from harness.models.recompute import checkpoint_layers, saved_by
from harness.models.skeleton import DTYPES, hf_config
from harness.models.units import decoder_layers

_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.*)")
_SIMPLE = (int, float, str, bool, type(None))
_PLACES = re.compile(r"idx|index|layer_number|layer_id")
_ATTENTION_DROPOUTS = (
    *("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"),
    "attention_dropout_prob",
)
_KERNELS = (
    *("causal_conv1d_fn", "selective_scan_fn", "mamba_chunk_scan_combined"),
    *("chunk_gated_delta_rule", "fused_recurrent_kda"),
)
"""Names in a family's file of kernels that another package provides for GPUs."""
_ATTENTION = re.compile("Attention")
_STATES = re.compile(
    "Mamba|Mixer|SSM|DeltaNet|DeltaAttention|KDA|Lightning|LinearAttention|ShortConv|Rwkv|xLSTM|"
    "LSTMLayer|RecurrentBlock|RgLru|RecurrentCell"
)
"""Patterns for class names of modules through which a token sees earlier ones: attention, whose
work grows with the square of the length, and recurrent states, whose work grows linearly."""
_SLIDING = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Config keys for the window size in tokens, by the layer's name in `layer_types`."""


@dataclass(frozen=True)
class Request:
    """A model and a micro-batch."""

    config: dict[str, Any]
    """Hugging Face config."""
    source: str | None
    """Folder or hub id, read for architectures with their own code."""
    precision: str
    attention: str
    micro_batch: int
    seq_len: int


@dataclass(frozen=True)
class Traced:
    """Bytes saved per micro-batch, without weights."""

    layers: tuple[int, ...]
    """Bytes per layer."""
    outside: int
    """Bytes of everything else: embedding, final norm, head, loss, and what layers share."""
    way: Way

    @property
    def bytes(self) -> int:
        """Bytes of the whole model."""
        return self.outside + sum(self.layers)


def trace(
    request: Request, change: Callable[[PreTrainedModel], LossSetup | None] = lambda model: None
) -> Traced:
    """Return the bytes that a model saves, by layer. `change` alters the built model as a run does,
    and returns the setup of its loss, if it changes that.

    Raises whatever the model class raises.
    """
    with _built(request) as model:
        setup = change(model) or PLAIN
        _, layers = decoder_layers(model)
        kinds = _kinds(model, layers)
        first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        chosen = [*first.values()]
        once = _saved(model, request, setup, chosen)
        more = {
            kind: _saved(model, request, setup, sorted([*chosen, index])) - once
            for kind, index in first.items()
        }
        way = _way(layers)
    return Traced(tuple(more[kind] for kind in kinds), once - sum(more.values()), way)


@contextmanager
def _built(request: Request) -> Iterator[PreTrainedModel]:
    config = hf_config(request.config, request.source)
    for part in (config, config.get_text_config()):
        for key in _ATTENTION_DROPOUTS:
            if getattr(part, key, None):
                setattr(part, key, 0.0)
    attention = "eager" if request.attention == "eager" else "sdpa"
    with FakeTensorMode(), no_init_weights():
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[request.precision], attn_implementation=attention
            )
        except ValueError:
            if attention == "eager":
                raise
            model = AutoModelForCausalLM.from_config(  # without sdpa
                config, dtype=DTYPES[request.precision], attn_implementation="eager"
            )
        model.tie_weights()  # some classes skip this if no weights are initialised
        model.train()
        yield model


def _kinds(model: PreTrainedModel, layers: nn.ModuleList) -> list[tuple[Any, ...]]:
    """Return a key per layer that is equal for layers of the same kind: its modules, their sizes
    and settings, and its entries in the config.
    """
    text = model.config.get_text_config(decoder=True)
    lists = [v for v in vars(text).values() if isinstance(v, list) and len(v) == len(layers)]
    return [
        (_described(layer), tuple(str(values[index]) for values in lists))
        for index, layer in enumerate(layers)
    ]


def _described(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, _SIMPLE) and not _PLACES.search(key)
            ),
            tuple(tuple(p.shape) for p in module.parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _saved(
    model: PreTrainedModel, request: Request, setup: LossSetup, chosen: Sequence[int]
) -> int:
    """Return the bytes that the model saves with some of its layers, possibly one of them twice."""
    with _only(model, chosen):
        ids = torch.zeros(request.micro_batch, request.seq_len, dtype=torch.int64)
        with saved_by(model) as saved:
            _loss = forward(model, ids, ids.clone(), None, setup)  # keeps alive what it saves
        return saved.bytes


@contextmanager
def _only(model: PreTrainedModel, chosen: Sequence[int]) -> Iterator[None]:
    """Within this context, the model and its config have only the chosen layers."""
    name, layers = decoder_layers(model)
    text = model.config.get_text_config(decoder=True)
    before = {
        key: value
        for key, value in vars(text).items()
        if isinstance(value, list) and len(value) == len(layers)
    }
    parent_name, _, attribute = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, attribute, nn.ModuleList([layers[index] for index in chosen]))
    vars(text).update({key: [value[i] for i in chosen] for key, value in before.items()})
    text.num_hidden_layers = len(chosen)
    try:
        yield
    finally:
        setattr(parent, attribute, layers)
        vars(text).update(before)
        text.num_hidden_layers = len(layers)


def _way(layers: nn.ModuleList) -> Way:
    """Return how layers with a recurrent state were traced."""
    carry = [layer for layer in layers if "states" in _mixers(layer).values()]
    files = {type(module).__module__ for layer in carry for module in layer.modules()}
    if not any(key in vars(sys.modules[file]) for file in files for key in _KERNELS):
        return "traced"
    return WITH_KERNELS if state_kernels.were_called() else BY_REFERENCE


def shape_of(request: Request) -> dict[str, Any]:
    """Return the sizes and parameters of any decoder, by position in the model, as plain values for
    `Shape(**sizes, body=...)`.

    Raises ValueError if the model has no list of decoder layers.
    """
    with _built(request) as model:
        tensors = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        name, layers = decoder_layers(model)
        sizes = _sizes(model.config.get_text_config(decoder=True), tensors, len(layers))
        mixers = [_mixers(layer) for layer in layers]
    return {"sizes": sizes, "body": _body(tensors, f"{name}.", mixers)}


def _mixers(layer: nn.Module) -> dict[str, str]:
    """Return the kind of tensors, attention or states, by the prefix of their names."""
    kinds = {}
    for name, module in layer.named_modules():
        kind = type(module).__name__
        if name and _STATES.search(kind):
            kinds[f"{name}."] = "states"
        elif name and _ATTENTION.search(kind):
            kinds[f"{name}."] = "attention"
    return kinds


def _body(
    tensors: list[tuple[str, tuple[int, ...]]], prefix: str, mixers: list[dict[str, str]]
) -> dict[str, Any]:
    """Split the tensors at the list of layers."""
    layers: list[list[Any]] = [[] for _ in mixers]
    before: list[Any] = []
    after: list[Any] = []
    met = False
    for name, shape in tensors:
        if name.startswith(prefix) and (match := _NUMBERED.match(name[len(prefix) - 1 :])):
            met = True
            kinds = mixers[int(match[2])].items()
            kind = next((kind for begin, kind in kinds if match[3].startswith(begin)), "mlp")
            layers[int(match[2])].append(_tensor(match[3], shape, kind))
        elif met:
            after.append(_tensor(name, shape, "head"))
        else:
            before.append(_tensor(name, shape, "embedding"))
    return {"before": before, "layer_prefix": prefix, "layers": layers, "after": after}


def _tensor(name: str, shape: tuple[int, ...], kind: str) -> list[Any]:
    """Return the entry of a tensor; vectors count as norms (they are norms and biases)."""
    return [name, list(shape), "norm" if len(shape) == 1 else kind]


def _sizes(
    text: PretrainedConfig, tensors: list[tuple[str, tuple[int, ...]]], layers: int
) -> dict[str, Any]:
    """Return the sizes in the config, under transformers' common names."""

    def size(name: str, otherwise: int) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) and value else otherwise

    hidden = (
        size("hidden_size", 0) or Counter(shape[-1] for _, shape in tensors).most_common(1)[0][0]
    )
    heads = size("num_attention_heads", 1)
    widths = [max(shape) for name, shape in tensors if _NUMBERED.match(name)]
    return {
        "model_type": text.model_type,
        "vocab_size": text.vocab_size,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", max(1, hidden // heads)),
        "intermediate_size": size("intermediate_size", max(widths, default=hidden)),
        "max_positions": size("max_position_embeddings", 0),
        "tied": bool(getattr(text, "tie_word_embeddings", False)),
        "sliding_windows": _windows(text, layers),
        "num_experts": 0,
        "experts_per_token": size("num_experts_per_tok", size("moe_k", size("top_k_experts", 0))),
        "expert_size": 0,
    }


def _windows(text: PretrainedConfig, layers: int) -> list[int | None]:
    """Return each layer's attention window in tokens; None if it sees all."""
    types = getattr(text, "layer_types", None) or [None] * layers
    return [getattr(text, _SLIDING.get(kind, ""), None) for kind in types]


def main() -> int:
    """Read a request and print the answer. If that fails, print a line to stderr and return 1."""
    values = json.load(sys.stdin)
    state_kernels.stand_in(values.pop("kernels", ()))
    request = Request(**values)
    try:
        answer = {**shape_of(request), **vars(trace(request))}
        kept = trace(request, lambda model: checkpoint_layers(model, "selective"))
        answer["selective"] = kept.layers
    except Exception as error:  # arbitrary model code may raise anything
        lines = str(error).strip().splitlines() or [""]
        print(f"{type(error).__name__}: {lines[0][:300]}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
