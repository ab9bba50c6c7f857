"""Products in float8: torchao's linear layers in place of the decoder layers'.

Parameters stay the same objects with the same names, so ZeRO, checkpoints, exports and weight decay
do not notice. Output layer and embeddings keep their precision.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.models.units import decoder_layers

_MULTIPLE = 16  # of both sides of a matrix, which the GPUs' instructions need


def use_float8(model: PreTrainedModel, recipe: str, emulate: bool, compiled: bool) -> None:
    """Multiply in float8 in the decoder layers' linear layers whose sides allow it; in place.

    `recipe`: torchao's, "tensorwise" or "rowwise"; `emulate`: compute in the model's precision with
    rounded operands; `compiled`: the compiler saves parameters, and traces torchao's own product
    alone. Raises ValueError if no layer allows it.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    own = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(own, emulate=emulate, pad_inner_dim=True)  # any number of tokens
    _, layers = decoder_layers(model)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)
    made = [module for module in model.modules() if isinstance(module, Float8Linear)]
    if not made:
        raise ValueError(f"no linear layer of {type(model).__name__} has sides of {_MULTIPLE}s")
    if compiled:
        return
    multiply = _multiplied_with_parameter()
    for module in made:
        module.forward = _forward(module, multiply)


def _fits(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and not (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    )


def _forward(module: Any, multiply: Any) -> Any:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = multiply(
            inputs, module.weight, module.linear_mm_config, module.config
        )
        return output if module.bias is None else output + module.bias.to(output.dtype)

    return forward


def _multiplied_with_parameter() -> Any:
    """Return torchao's product, which saves the parameter. torchao saves a view of it: under ZeRO 3
    the gathered weights of all layers would live until the backward pass.
    """
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as theirs

    class Product(theirs):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, inputs: Any, weight: Any, products: Any, config: Any) -> Any:
            output = theirs.forward(context, inputs, weight.t(), products, config)
            context.save_for_backward(inputs, weight)
            return output

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            inputs, weight = context.saved_tensors
            seen = SimpleNamespace(
                saved_tensors=(inputs, weight.t()),
                linear_mm_config=context.linear_mm_config,
                config=context.config,
            )
            of_inputs, of_weight, *others = theirs.backward(seen, gradient)
            return of_inputs, of_weight.t(), *others

    return Product.apply
