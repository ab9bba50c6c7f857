"""Calls of Liger's fused head and loss in the real engine, with a stand-in for its kernels.

Triton runs only on GPUs: tests/models/test_kernels.py.
"""

from __future__ import annotations

import sys
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.engine.engines import batches, engine_of, stage
from tests.ranks import ranks


class _Fused(torch.autograd.Function):
    """Computes gradients in the forward pass, as Liger does."""

    @staticmethod
    def forward(
        context: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.enable_grad():
            hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
            loss = functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
            context.save_for_backward(*torch.autograd.grad(loss, (hidden, weight)))
        return loss.detach()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = context.saved_tensors
        return hidden * gradient, weight * gradient, None


def lce_forward(self: Any, *, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
    """Compute as liger_kernel/transformers/model/llama.py, which reads the head's weight outside
    the head.
    """
    labels = kwargs.pop("shift_labels").view(-1)
    assert (kwargs["num_items_in_batch"], kwargs["accum_dtype"]) == (1, torch.float32)
    hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state.flatten(0, 1)
    loss = _Fused.apply(hidden, self.lm_head.weight, labels)  # type: ignore[no-untyped-call]
    return CausalLMOutputWithPast(loss=loss)


def apply(model: Any, *, rope: bool, fused_linear_cross_entropy: bool) -> None:
    assert fused_linear_cross_entropy
    assert not rope
    model.forward = MethodType(lce_forward, model)


@ranks(2)
def test_zero_3_gathers_the_heads_weight_that_is_read_outside_the_head() -> None:
    """The head's gradient is summed in fp32 over chunks of tokens, as requested."""
    package: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    package._apply_liger_kernel_to_instance = apply
    names = ("liger_kernel", "liger_kernel.transformers", package.__name__)
    modules = {name: ModuleType(name) for name in names} | {package.__name__: package}
    seen: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    with mock.patch.dict(sys.modules, modules), mock.patch("harness.plan.layers._check_liger"):
        for kernels in ("none", "liger"):
            engine = engine_of(stage(3), model={"kernels": kernels})
            losses: list[float] = []
            gradients: dict[str, torch.Tensor] = {}
            for step in range(2):
                losses.append(float(engine.accumulate(*batches(step))))
                gradients |= {f"{step} {name}": g.clone() for name, g in engine.gradients()}
                engine.apply(0.01)
            seen.append((losses, gradients))
            engine.close()
    (expected, exact), (found, fused) = seen
    assert found == pytest.approx(expected, rel=1e-6)
    for name, gradient in exact.items():
        assert float((fused[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name
