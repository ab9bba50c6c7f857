"""Values of a model config that only transformers fails on."""

from __future__ import annotations

import pytest

from harness.engine.meta_model import empty_model
from harness.errors import ConfigError
from harness.plan.command import parse_command, plan_from


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.overrides.hidden_act=silu_", "silu_"),
        ("model.overrides.initializer_range=-1.0", "smaller or equal to 1.0, got -1.0"),
        ("model.overrides.mlp_bias=3", "mlp_bias"),
        ("model.overrides.eos_token_id='x'", "eos_token_id"),
    ],
)
def test_what_transformers_cannot_build_is_one_report(word, said):
    plan = plan_from(parse_command([word]), {"DS_ACCELERATOR": "cpu"})
    with pytest.raises(ConfigError) as caught:
        empty_model(plan, trust_remote_code=False)
    (problem,) = caught.value.problems
    assert problem.startswith("model.name=tiny: transformers cannot build it: ")
    assert said in problem
    assert problem.endswith(f"(model.overrides: {word.split('.')[2].partition('=')[0]})")
