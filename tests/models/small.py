"""Small models with weights, and what their passes compute."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.models.initialize import materialize
from harness.models.loss import forward
from harness.models.skeleton import DTYPES, hf_config, skeleton
from tests.engine.small import EAGER

CPU = torch.device("cpu")
_NO_SDPA = {*EAGER, "gemma2", "mamba2", "recurrent", "xlstm"}


def attention_of(config: dict[str, Any]) -> str:
    """Return sdpa if the model type has it, otherwise eager."""
    return "eager" if config["model_type"] in _NO_SDPA else "sdpa"


def built(config: dict[str, Any], precision: str = "fp32", attention: str = "") -> Any:
    """Return a model in training with the weights of seed 0."""
    model = skeleton(hf_config(config), DTYPES[precision], attention or attention_of(config))
    materialize(model, 0, CPU)
    return model.train()


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradient of every trained parameter that has one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def loss_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the loss of a batch with ids below 63, and the gradient of every trained parameter."""
    torch.manual_seed(1)
    ids = torch.randint(0, 63, (2, 16))
    loss = forward(model, ids, ids.clone())[0]
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))
