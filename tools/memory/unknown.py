"""The estimate of an architecture that the planner does not know, from its own class built empty.

Its parameters are those that transformers makes, name by name. What a layer keeps for the backward
pass is traced at two depths; the head and the temporaries are those of a Llama of its sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from harness.errors import ConfigError
from harness.estimate.dividable import division_problems
from harness.estimate.hardware import known_gpu
from harness.estimate.inputs import GIB
from harness.estimate.timeline import Estimate, estimate_memory
from harness.layout.shape import Shape
from harness.layout.tensors import Body, Tensor
from harness.models.skeleton import hf_config, skeleton
from harness.plan.memory import memory_inputs
from harness.plan.plan import Plan
from tools.memory.trace import traced_layer

_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.*)")


def traced_estimate(plan: Plan) -> Estimate:
    """What `plan` comes to, though its family is unknown. Raises ConfigError where the class cannot
    be built or run on fake tensors.
    """
    try:
        shape = shape_of(plan.model_config, plan.model_source)
        inputs = memory_inputs(replace(plan, shape=shape))
        assert inputs is not None
        layer = traced_layer(plan.model_config, inputs, plan.model_source)
    except ConfigError:
        raise
    except Exception as error:  # whatever a class that nobody here has seen may raise
        raise ConfigError(
            f"{plan.model_source}: its class cannot be traced: {type(error).__name__}: {error}"
        ) from error
    if problems := division_problems(inputs):
        raise ConfigError(problems)
    gpu = known_gpu(plan.world.gpu)
    inputs = replace(inputs, traced_layer_bytes=layer / inputs.tokens)
    return estimate_memory(inputs, int(gpu.memory_gib * GIB) if gpu else None)


def shape_of(config: dict[str, Any], source: str | None = None) -> Shape:
    """The shape of any decoder: its tensors are those of the model built empty, kinds by place."""
    made = hf_config(config, source)
    model = skeleton(made, torch.float32)
    tensors = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    text = made.get_text_config()
    return Shape(**_sizes(text, tensors), body=_body(tensors))


def _body(tensors: list[tuple[str, tuple[int, ...]]]) -> Body:
    """Split at the list of layers: the numbered names of which there are most."""
    counts = Counter(match[1] for name, _ in tensors if (match := _NUMBERED.match(name)))
    if not counts:
        raise ConfigError("no layers: none of its parameters' names holds a number")
    prefix = counts.most_common(1)[0][0]
    layers: dict[int, list[Tensor]] = {}
    before: list[Tensor] = []
    after: list[Tensor] = []
    for name, shape in tensors:
        match = _NUMBERED.match(name)
        if match and match[1] == prefix:
            layers.setdefault(int(match[2]), []).append(_tensor(match[3], shape, "mlp"))
        elif layers:
            after.append(_tensor(name, shape, "head"))
        else:
            before.append(_tensor(name, shape, "embedding"))
    body = tuple(tuple(layers[index]) for index in sorted(layers))
    return Body(tuple(before), prefix, body, tuple(after))


def _tensor(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    """Of a kind that goes by its place; vectors are norms and biases."""
    return Tensor(name, shape, "norm" if len(shape) == 1 else kind)


def _sizes(text: PretrainedConfig, tensors: list[tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Return the sizes in the config, by transformers' common names."""

    def size(name: str, otherwise: int) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) else otherwise

    hidden, heads = text.hidden_size, text.num_attention_heads
    width = max(max(shape) for name, shape in tensors if _NUMBERED.match(name))
    return {
        "model_type": text.model_type,
        "vocab_size": text.vocab_size,
        "hidden_size": hidden,
        "num_layers": text.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", hidden // heads),
        "intermediate_size": size("intermediate_size", width),
        "max_positions": size("max_position_embeddings", 0),
        "tied": bool(text.tie_word_embeddings),
        "sliding_windows": (None,) * text.num_hidden_layers,
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_size": 0,
    }
