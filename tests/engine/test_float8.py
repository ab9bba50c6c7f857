"""Products in float8 (model.float8), emulated on two CPU ranks."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.engines import engine_of, losses, share_of
from tests.ranks import ranks

pytest.importorskip("torchao")
RECIPES = ("tensorwise", "rowwise")
ROUNDING = 0.02
"""Largest difference of a loss from bf16's."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ds", ["zero1", "zero2", "zero3"])
@ranks(2)
def test_losses_of_float8_are_near_those_of_bf16(ds: str, recipe: str) -> None:
    seen = {}
    for way in ("none", recipe):
        engine = engine_of(f"{ds} bf16", model={"float8": way})
        names = [name for name, _ in engine.module.named_parameters()]
        seen[way] = losses(engine, 3), names
        engine.close()
    (rounded, own_names), (plain, names) = seen[recipe], seen["none"]
    assert own_names == names
    assert rounded != plain
    assert rounded == pytest.approx(plain, abs=ROUNDING)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@ranks(2)
def test_zero_3_keeps_no_gathered_weights_for_float8(checkpointing: str) -> None:
    engine = engine_of("zero3 bf16", model={"float8": "rowwise", "checkpointing": checkpointing})
    gathered = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        """Note a saved tensor that shares its memory with a weight that is whole at present."""
        whole = (p.untyped_storage()._cdata for p in engine.module.parameters() if p.numel())
        if (storage := tensor.untyped_storage())._cdata in whole:
            gathered.append(StorageWeakRef(storage))
        return tensor

    batches, _ = share_of(engine)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = engine.forward.in_training(0, batches[0])
    assert len(gathered) > 0
    assert [ref for ref in gathered if not ref.expired()] == []
    loss.backward()
