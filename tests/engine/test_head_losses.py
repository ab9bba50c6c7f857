"""The chunked loss, and Liger's fused one, in the real engine: gathers, gradients, fallback."""

import sys
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.engine.engines import engine_of, losses, share_of
from tests.ranks import ranks

CHUNK = 24  # of 64 entries


def count_gathers(engine: Any) -> int:
    """Return how often two micro-batches gather the head's weight with ZeRO 3. Collective."""
    head: Any = engine.module.get_output_embeddings().weight
    count = 0

    def counted(gather: Any) -> Any:
        def gather_and_count(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += any(parameter is head for parameter in parameters)
            return gather(parameters, *args, **kwargs)

        return gather_and_count

    parameter: Any
    for parameter in engine.module.parameters():
        parameter.all_gather_coalesced = counted(parameter.all_gather_coalesced)
    engine.accumulate(*share_of(engine))
    return count


@ranks(2)
def test_chunked_loss_under_zero_3_gathers_no_more() -> None:
    values, gathers = [], []
    for chunk in (0, CHUNK):
        engine = engine_of("zero3", model={"loss_chunk": chunk})
        before = losses(engine, 2)
        sums = engine.sum_over_ranks(engine.eval_batch(share_of(engine)[0]))
        # In the steps after the evaluation, DeepSpeed learns the order of the modules.
        values.append([*before, *sums.tolist(), *losses(engine, 2)])
        gathers.append(count_gathers(engine))
        engine.close()
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert 0 < gathers[1] <= gathers[0]


@ranks(2)
def test_a_model_without_chunks_trains_with_an_event() -> None:
    from harness.engine import build  # imports DeepSpeed

    why = ValueError("the logits of Some are not those of its output head")
    with mock.patch.object(build, "operations_on_logits", side_effect=why):
        engine = engine_of("zero1", model={"loss_chunk": CHUNK})
    first, second = losses(engine, 2)
    assert second < first
    (event,) = (event for event in engine.events if event["kind"] == "loss_not_chunked")
    assert "model.loss_chunk" in event["message"]
    assert "the logits of Some are not those of its output head" in event["message"]


# A stand-in for Liger, whose kernels run on GPUs only: tests/models/test_kernels.py.
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
    """Compute as Liger's llama.py, which reads the head's weight outside the head."""
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
def test_zero_3_gathers_head_weight_read_outside_the_head() -> None:
    """The head's gradient is summed in fp32 over chunks of tokens, as requested."""
    package: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    package._apply_liger_kernel_to_instance = apply
    names = ("liger_kernel", "liger_kernel.transformers", package.__name__)
    modules = {name: ModuleType(name) for name in names} | {package.__name__: package}
    seen: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    with mock.patch.dict(sys.modules, modules), mock.patch("harness.plan.layers._check_liger"):
        for kernels in ("none", "liger"):
            engine = engine_of("zero3", model={"kernels": kernels})
            losses: list[float] = []
            gradients: dict[str, torch.Tensor] = {}
            for step in range(2):
                losses.append(float(engine.accumulate(*share_of(engine, step))))
                gradients |= {f"{step} {name}": g.clone() for name, g in engine.gradients()}
                engine.apply(0.01)
            seen.append((losses, gradients))
            engine.close()
    (expected, exact), (found, fused) = seen
    assert found == pytest.approx(expected, rel=1e-6)
    for name, gradient in exact.items():
        assert float((fused[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name
