from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.ds_keys import ds_keys, literal, offloaded_to, value_of

REPOSITORY = Path(__file__).resolve().parents[2]


def test_literal_and_value():
    ds = {"fp16": {"enabled": "auto", "loss_scale": 8}, "gradient_clipping": None}
    assert (literal(ds, "fp16.enabled"), value_of(ds, "fp16.enabled")) == (None, False)
    assert (literal(ds, "fp16.loss_scale"), value_of(ds, "fp16.loss_scale")) == (8, 8)
    assert (literal(ds, "bf16.enabled"), value_of(ds, "gradient_clipping")) == (None, 1.0)


@pytest.mark.parametrize(
    ("zero", "device"),
    [
        ({}, "none"),
        ({"offload_optimizer": None}, "none"),
        ({"offload_optimizer": {}}, "none"),
        ({"offload_optimizer": {"device": "none"}}, "none"),
        ({"offload_optimizer": {"device": "cpu"}}, "cpu"),
        ({"offload_param": {"device": "cpu"}}, "none"),
    ],
)
def test_where_the_optimizer_is_offloaded_to(zero, device):
    assert offloaded_to({"zero_optimization": zero}, "optimizer") == device


def test_the_table_of_keys_is_what_the_installed_deepspeed_says():
    script = REPOSITORY / "tools" / "proofs" / "generate_ds_keys.py"
    code = f"import runpy; print(runpy.run_path({str(script)!r})['as_text'](), end='')"
    fresh = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(fresh) == ds_keys()
    size = (REPOSITORY / "harness" / "config" / "ds_keys.json").stat().st_size
    assert size < 300 * 1024


def test_the_table_holds_what_deepspeeds_documentation_shows():
    """Spot checks by hand, so that a generator that finds nothing cannot pass."""
    known = {
        "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
        "zero_optimization.offload_param.max_in_cpu": 1_000_000_000,
        "fp16.initial_scale_power": 16,
        "bf16.check_grad_overflow": True,
        "gradient_clipping": 1.0,
        "activation_checkpointing.cpu_checkpointing": False,
        "aio.queue_depth": 8,
        "pipeline.stages": "auto",
        "flops_profiler.module_depth": -1,
        "wandb.project": "deepspeed",
        "data_efficiency.seed": 1234,
        "expert_parallel.autoep_size": 1,
        "timers.throughput.synchronized": True,
        "sequence_parallel_size": 1,
    }
    assert {key: value_of({}, key) for key in known} == known
