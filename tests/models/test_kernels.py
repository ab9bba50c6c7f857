"""Liger's kernels against the model's own code; Triton runs only on GPUs."""

import importlib.util
from typing import Any

import pytest
import torch

from harness.models.layer_changes import use_liger
from harness.models.loss import LossSetup, forward
from harness.plan.layers import LIGER_FAMILIES
from tests.gates.models import LEARNED
from tests.models.small import built
from tests.tiers import rest_in_gate

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None,
    reason="needs a GPU and liger-kernel",
)


def loss_and_gradients(config: dict[str, Any], liger: bool) -> tuple[float, list[torch.Tensor]]:
    model = built(config).cuda()
    if liger:
        use_liger(model)
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 128, (2, 32), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    loss, _ = forward(model, ids.cuda(), labels.cuda(), setup=LossSetup(fuses_loss=liger))
    (loss / 59 * 4096).backward()  # as the engine scales it
    return float(loss), [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("family", rest_in_gate("models", LIGER_FAMILIES))
def test_loss_and_gradients_are_those_of_the_model(family: str) -> None:
    config = {**LEARNED["llama"], "model_type": family}
    expected, gradients = loss_and_gradients(config, liger=False)
    found, fused = loss_and_gradients(config, liger=True)
    assert found == pytest.approx(expected, rel=1e-6)
    for own, theirs in zip(gradients, fused, strict=True):
        assert float((own - theirs).norm()) <= 1e-5 * float(own.norm())
    again, _ = loss_and_gradients(config, liger=False)  # the next model is unchanged
    assert again == expected
