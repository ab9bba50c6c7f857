"""Every shipped DeepSpeed JSON, and its meaning to the plan and to DeepSpeed itself."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.config.assignments import flat
from harness.config.ds_json import literal, read_ds_json, value_of
from harness.config.run_config import RunConfig
from harness.layout.world import World
from harness.plan import resolve_auto
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from tests.shipped import DS_CONFIGS, fewest_ranks, model_for
from tests.tables import beside

TABLES = beside(__file__, "shipped_configs.toml")

pytestmark = pytest.mark.usefixtures("cpu_with_bf16")

EXPECTED = TABLES["expected"]
# Owned by the run config: none of its key=value can conflict with a shipped JSON.
OWNED = ("optimizer", "scheduler", "gradient_clipping", "train_batch_size")


def shipped(name: str) -> Plan:
    """Return the plan on the fewest ranks that a JSON needs."""
    ds = read_ds_json(DS_CONFIGS / f"{name}.json")
    ranks = fewest_ranks(ds)
    run = RunConfig.model_validate({"model": {"name": model_for(ds)}})
    return make_plan(run, ds, World(world_size=ranks, local_world_size=ranks))


def test_every_shipped_json_is_expected_here() -> None:
    assert {path.stem for path in DS_CONFIGS.glob("*")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_json_means_what_its_name_says(name: str) -> None:
    plan = shipped(name)
    offloaded = [
        part
        for part in ("optimizer", "param")
        if value_of(plan.deepspeed, f"zero_optimization.offload_{part}.device") == "cpu"
    ]
    assert [plan.precision, plan.zero_stage, " ".join(offloaded)] == EXPECTED[name]
    assert plan.events == ()
    if plan.precision == "bf16":
        assert plan.deepspeed["data_types"]["grad_accum_dtype"] == "fp32"
    if name in ("pipeline2", "pipeline4"):  # they split the default model
        assert plan.grid.pipeline == int(name[-1]) == len(plan.stages) - 1


@pytest.mark.parametrize("name", EXPECTED)
def test_a_json_repeats_no_default_and_nothing_of_the_run_config(name: str) -> None:
    ds = read_ds_json(DS_CONFIGS / f"{name}.json")
    assert [key for key in OWNED if literal(ds, key) is not None] == []
    repeated = {key for key, value in flat(ds) if value_of({}, key) == value}
    assert {key for key in repeated if not key.startswith("fp16.")} <= {*TABLES["shown"]}


def test_bf16_states_are_fp32_where_the_device_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped("zero2_bf16_states").deepspeed["bf16"]["bf16_optimizer_states"] is True
    monkeypatch.setattr(resolve_auto, "cpu_has_bf16", lambda: False)
    plan = shipped("zero2_bf16_states")
    assert (plan.precision, plan.deepspeed["bf16"]) == ("fp32", {"enabled": False})


def test_nvme_begins_in_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    section = shipped("zero3_nvme").deepspeed["zero_optimization"]["offload_optimizer"]
    assert (section["device"], section["nvme_path"]) == ("nvme", str(tmp_path))


@pytest.mark.parametrize(("ranks", "per_node", "copies"), [(4, 2, 2), (16, 8, 8), (1, 1, 1)])
def test_zeropp_copies_the_weights_into_every_node(ranks: int, per_node: int, copies: int) -> None:
    ds = read_ds_json(DS_CONFIGS / "zeropp.json")
    plan = make_plan(RunConfig(), ds, World(world_size=ranks, local_world_size=per_node))
    assert plan.deepspeed["zero_optimization"]["zero_hpz_partition_size"] == copies


def test_fp16_shows_every_knob_of_dynamic_loss_scaling() -> None:
    assert set(read_ds_json(DS_CONFIGS / "fp16.json")["fp16"]) == {
        *("enabled", "loss_scale", "initial_scale_power", "loss_scale_window"),
        *("hysteresis", "consecutive_hysteresis", "min_loss_scale"),
    }
    assert value_of(shipped("fp16").deepspeed, "fp16.loss_scale") == 0
    assert value_of(shipped("fp16_static").deepspeed, "fp16.loss_scale") > 1


@pytest.mark.gate("plan")
def test_deepspeed_accepts_every_resolved_json() -> None:
    resolved, expected = {}, {}
    for name in EXPECTED:
        plan = shipped(name)
        # DeepSpeed treats ranks with parts of one row as data ranks, and has one rank here.
        samples = plan.deepspeed["train_batch_size"] // plan.grid.sequence // plan.grid.data
        resolved[name] = {**plan.deepspeed, "train_batch_size": samples}
        batch = [48, 8, 6] if plan.grid.data == 1 else [6, 6, 1]  # of eight data ranks
        expected[name] = [EXPECTED[name], batch]
    done = subprocess.run(
        [sys.executable, "-c", TABLES["read"]],
        input=json.dumps(resolved),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == expected
