"""Optimizers, groups, and defaults for given weights, adapters and 4-bit weights."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.config.assignments import BY_SIZE
from harness.config.ds_json import DsJson
from harness.config.optim_and_schedule import GroupConfig
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.estimate.states import model_states
from harness.layout.optimizer_table import OPTIMIZERS, Group, Parameter, optimizer_groups
from harness.layout.world import World
from harness.plan.make import make_plan, with_facts
from harness.plan.memory import Traced
from harness.plan.merge_settings import merge_settings
from harness.plan.model_config import find_model_config
from harness.plan.plan import Draft, Facts, Plan
from harness.run.resumption import foreseen
from tests.engine.small import MODEL
from tests.plan.conftest import Packages
from tests.plan.plans import Planner
from tests.tables import beside


def test_what_is_adopted_has_the_jsons_key_as_its_origin() -> None:
    ds = DsJson({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, "ds.json")
    draft = Draft(RunConfig(), ds, World())
    merge_settings(draft)
    assert draft.config.origin("optim.lr") == "ds.json: optimizer.params.lr"
    assert draft.config.origin("optim.betas") == "ds.json: DeepSpeed's default for AdamW"
    event = {"kind": "adopted", "key": "optim.lr", "value": 3e-5}
    assert draft.events[0] == {**event, "json_key": "optimizer.params.lr"}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_has_a_plan(name: str, planned: Planner) -> None:
    package = OPTIMIZERS[name].package
    if package and not find_spec(package):
        pytest.skip(f"{package} is not here")
    stage = 0 if name == "adafactor" else 2
    made = planned(f"optim.name={name} ds.zero_optimization.stage={stage}")
    section = made.deepspeed["optimizer"]
    assert section["type"] == OPTIMIZERS[name].json_type
    assert {"lr", "weight_decay", *OPTIMIZERS[name].takes} <= set(section["params"])
    assert made.estimate is not None


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["adamw", "adam", "muon", "sgd"])
def test_adam_is_fused_torch_on_gpu_and_deepspeed_on_host(
    accelerator: Any, offload: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler is needed unless an optimizer is offloaded."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    device = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    run = RunConfig.model_validate({"optim": {"name": name}})
    ds = {"zero_optimization": {"stage": 2, **device}}
    made = make_plan(run, ds, World(accelerator=accelerator), here=True)
    params = made.deepspeed["optimizer"]["params"]
    assert params.get("torch_adam", False) is (name in ("adamw", "adam") and not offload)
    is_fused = accelerator == "cuda" and name != "sgd" and not offload
    assert params.get("fused", False) is is_fused
    assert "fallback" not in [event["kind"] for event in made.events]


def test_missing_and_offloaded_packages_are_named(packages: Packages, planned: Planner) -> None:
    offload = "ds.zero_optimization.stage=2 ds.zero_optimization.offload_optimizer.device=cpu"
    packages("bitsandbytes")
    (problem,) = planned.problems(f"optim.name=adam8bit {offload}")
    assert "remove zero_optimization.offload_optimizer" in problem
    packages("bitsandbytes", none=True)
    for words in ("optim.name=adam8bit", f"{START} model.lora.rank=4 {NF4}"):
        (problem,) = planned.problems(words)
        assert "pip install bitsandbytes" in problem


def test_groups_follow_the_first_rule_that_fits() -> None:
    parameters = [
        Parameter("embed", matrix=False),
        Parameter("layer.q", matrix=True),
        Parameter("layer.norm", matrix=False),
        Parameter("head", matrix=True, head=True),
    ]
    rules = [
        GroupConfig(pattern="layer", lr_multiplier=0.5),
        GroupConfig(pattern="norm|head", lr_multiplier=2.0, weight_decay=0.3),
    ]
    assert optimizer_groups(parameters, 0.1, rules, muon=True, adam_rate=0.25) == [
        (Group(0.0, 0.25), ["embed"]),
        (Group(0.1, 0.5, muon=True), ["layer.q"]),
        (Group(0.0, 0.125), ["layer.norm"]),
        (Group(0.3, 0.5), ["head"]),
    ]


def test_muon_takes_both_rates_of_deepspeeds_json(planned: Planner) -> None:
    params = {"muon_lr": 0.02, "lr": 0.5, "adam_lr": 3e-4, "ns_method": "gram"}
    made = planned("", {"optimizer": {"type": "Muon", "params": params}}, estimate=False)
    assert (made.config.optim.lr, made.config.optim.adam_lr) == (0.02, 3e-4)
    parameters = [Parameter("layer.q", matrix=True), Parameter("embed", matrix=False)]
    groups = optimizer_groups(parameters, 0.1, muon=True, adam_rate=0.25)
    assert [group.lr_multiplier for group, _ in groups] == [1.0, 0.25]
    assert optimizer_groups(parameters, 0.1, adam_rate=0.25)[1][0].lr_multiplier == 1.0


def test_muon_leaves_embeddings_and_the_head_to_adamw(planned: Planner) -> None:
    made = planned("optim.name=muon ds.zero_optimization.stage=3")
    parts = model_states(made.estimate.inputs, 0)
    (moments,) = (part.bytes for part in parts if part.component == "moments")
    elements = sum(tensor.numel for tensor in made.shape.tensors())
    assert 4 * elements < moments < 8 * elements


NF4 = "model.lora.quantize=nf4"
SHORT = "data.seq_len=16 train.global_batch=8"


START = f"{SHORT} model.init_from=$small"
"""A run that starts from given weights."""


@pytest.mark.parametrize(("words", "steps"), beside(__file__, "optimizer.toml")["warm_ups"])
def test_the_warm_up_is_a_share_of_the_run(words: str, steps: int, planned: Planner) -> None:
    made = planned(f"{START} {words}", estimate=False)
    assert made.schedule(100).warmup == steps
    assert made.schedule(100).lr(steps) == pytest.approx(made.config.optim.lr)


def test_traced_model_has_its_sizes_rate(planned: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace is the estimate's, which is kept."""
    requests = []
    shape = planned("model.name=llama-3-8b").shape
    assert shape is not None
    bytes_of_layers = (1000,) * shape.num_layers

    def traced(request: dict[str, Any]) -> Traced:
        requests.append(request)
        return Traced(shape, bytes_of_layers, bytes_of_layers, 0, "traced")

    monkeypatch.setattr("harness.plan.memory.traced", traced)
    line = "GPU=h100-80 ds.bf16.enabled=auto model.name=$no_layers data.seq_len=256"
    made = planned(line)
    assert made.shape is None
    assert made.estimate is not None
    assert requests == [requests[0]] * 2
    assert made.config.optim.lr == pytest.approx(3e-4, rel=0.1)
    assert made.config.origin("optim.lr") == BY_SIZE
    assert made.deepspeed["optimizer"]["params"]["lr"] == made.config.optim.lr
    assert "10 times the 0.0003 that" in planned.notes(f"{line} optim.lr=3e-3")[-1]


def test_random_weights_keep_their_defaults(planned: Planner) -> None:
    made = planned(SHORT, estimate=False)
    assert (made.config.optim.lr, made.steps) == (3e-3, 100)
    assert made.config.origin("optim.lr") == "default"
    by_size = planned("model.name=llama-3-8b", estimate=False)
    assert by_size.config.origin("optim.lr") == BY_SIZE


def test_adapters_are_counted_in_the_plan(planned: Planner) -> None:
    made = planned(f"{START} model.lora.rank=4")
    inputs = made.estimate.inputs
    assert (inputs.trained, inputs.frozen) == (6144, sum(t.numel for t in inputs.shape.tensors()))
    assert json.loads(json.dumps(made.to_json()))["run"]["model"]["lora"]["rank"] == 4


def test_plan_of_7b_in_4_bits_fits_24_gib(planned: Planner) -> None:
    def gib(plan: Plan, component: str) -> float:
        parts = [part for part in plan.estimate.worst.parts if part.component == component]
        return sum(part.bytes for part in parts) / 2**30

    weights = planned.add("seven_b", find_model_config("llama-2-7b")[0]).parent
    words = f"{SHORT} model.init_from={weights} model.lora.rank=16"
    lora, qlora = planned(words), planned(f"{words} {NF4}")
    assert gib(lora, "dequantized weight") == 0
    # 6.48e9 weights at 4.127 bits (QLoRA, section 3); 0.26e9 and the adapters unchanged.
    count = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    saved = count * (4 * 8 / 8 - bits / 8) / 2**30  # fp32 on CPUs
    assert gib(lora, "parameters") - gib(qlora, "parameters") == pytest.approx(saved, rel=1e-3)
    assert gib(qlora, "dequantized weight") == pytest.approx(4096 * 11008 * 4 / 2**30, rel=0.02)


def test_a_dry_run_expects_the_rows_that_the_run_added(planned: Planner, tmp_path: Path) -> None:
    weights = planned.add("weights", MODEL).parent
    plan = planned(f"{SHORT} model.init_from={weights} run.dir={tmp_path}", estimate=False)
    (tmp_path / "plan.json").write_text(json.dumps(with_facts(plan, Facts(ids=90)).to_json()))
    status = {"outcome": "stopped", "step": 4, "attempt": 1}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert foreseen(plan)[0].endswith("stopped at step 4: no checkpoint, so it starts again")


def test_the_checkpoints_of_a_run_get_no_new_rows(planned: Planner) -> None:
    """Not even for a larger tokenizer, which is known once the data is read; the run's export gets
    them.
    """
    run = planned.add("run", MODEL).parent
    given = f"{SHORT} model.init_from={run}"
    assert planned(f"{given} model.overrides.vocab_size=90", estimate=False)
    plan = planned(given, estimate=False)
    assert with_facts(plan, Facts(ids=90)).model_config["vocab_size"] == 90
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    why = "whose checkpoints have 64 vocabulary rows, but 90 are needed"
    (problem,) = planned.problems(f"{given} model.overrides.vocab_size=90")
    assert problem.endswith(f"{why}: set model.init_from=$run/export")
    with pytest.raises(ConfigError, match=why):
        with_facts(plan, Facts(ids=90))
    assert with_facts(plan, Facts(ids=64)).model_config == plan.model_config


@pytest.mark.parametrize("step", ["", "@1"])
def test_adapters_start_from_a_runs_export(step: str, planned: Planner, tmp_path: Path) -> None:
    run, export = tmp_path, tmp_path / f"export{'-step-1' if step else ''}"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    line = f"{SHORT} model.name=$small model.init_from={run}{step} model.lora.rank=4"
    write = f"write it with python tools/export_hf.py {run}{step}"
    assert planned.problems(line)[0].endswith(write)
    export.mkdir()
    (export / "adapter_config.json").touch()
    assert planned.problems(line)[0].endswith(f"{write} --merge")
    (export / "adapter_config.json").unlink()
    (export / "config.json").write_text(json.dumps(MODEL))
    assert planned(line, estimate=False).config.model.init_from == str(export)
    (run / "plan.json").write_text(json.dumps({"run": {"model": {"lora": {"rank": 4}}}}))
    assert f"{run} --merge, and" in planned.problems(line.removesuffix("model.lora.rank=4"))[0]
