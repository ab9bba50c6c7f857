"""Steps of the real engine on two ranks."""

from __future__ import annotations

import pytest
import torch

from harness.config.ds_json import read_ds_json
from tests.engine.engines import (
    SGD,
    STAGES,
    batches,
    cells,
    engine_of,
    fp16,
    gathered,
    losses,
    stage,
)
from tests.ranks import ranks
from tests.shipped import DS_CONFIGS, fewest_ranks

# zero3_nvme needs a library that may be missing: tests/plan/test_swap_space.py.
SHIPPED = sorted(
    path.stem
    for path in DS_CONFIGS.glob("*.json")
    if fewest_ranks(read_ds_json(path)) <= 2 and path.stem != "zero3_nvme"
)


@pytest.mark.parametrize("number", STAGES)
@ranks(2)
def test_clipping_by_value_clamps_every_element_and_reports_the_norm_before(number: int) -> None:
    """One SGD step with rate 1 moves every weight by its clamped gradient."""
    limit = 1e-3
    engine = engine_of(stage(number), optim={**SGD, "clip_value": limit})
    before = dict(engine.masters())
    engine.accumulate(*batches())
    gradients = dict(engine.gradients())
    norm = float(engine.apply(1.0))
    moved = {name: before[name] - after for name, after in engine.masters()}
    engine.close()
    for name, gradient in gradients.items():
        assert (moved[name] - gradient.clamp(-limit, limit)).abs().max() < 1e-6, name
    assert sum(int((g.abs() > limit).sum()) for g in gradients.values()) > 100
    true_norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert norm == pytest.approx(float(true_norm), rel=1e-5)


@ranks(2)
def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    engine = engine_of(fp16())
    before, scale = dict(engine.masters()), engine.loss_scale
    engine.train_batch(*batches(), 1e-3)
    assert engine.step_applied is False
    assert engine.skipped_steps == 1
    assert engine.loss_scale / scale == 0.5
    assert all(torch.equal(before[name], after) for name, after in engine.masters())
    engine.close()


@pytest.mark.parametrize("name", cells(SHIPPED, ("zero1", "zero2_offload")))
@ranks(2)
def test_a_shipped_config_trains(name: str) -> None:
    """Offload runs the optimizer that steps on the CPU."""
    engine = engine_of(read_ds_json(DS_CONFIGS / f"{name}.json"))
    falling = losses(engine, 12)
    if name in ("zero2_offload", "zero3_offload"):
        assert engine.describe()["inner_optimizer"] == "DeepSpeedCPUAdam"
    engine.close()
    assert gathered(falling) == [falling, falling]
    assert falling[-1] < falling[0] - 0.3
