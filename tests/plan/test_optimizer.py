"""Optimizers and schedules: settings adopted from the JSON, DeepSpeed's JSON, and groups."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from harness.config.ds_json import DsJson
from harness.config.optim_and_schedule import GroupConfig, OptimConfig, Schedule
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.estimate.states import model_states
from harness.layout.optimizer_table import OPTIMIZERS, Group, Parameter, optimizer_groups
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.merge_settings import SCHEDULES, merge_settings
from harness.plan.plan import Draft
from tests.plan.conftest import Packages
from tests.plan.plans import Planner

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
WARMUP = {"warmup_steps": 1000, "warmup_type": "log"}
DECAY = {"warmup_max_lr": 3e-5, "warmup_num_steps": 30, "total_num_steps": 200}
COSINE = {"cos_min_ratio": 0.05, "warmup_type": "linear", "warmup_min_ratio": 0}
DECAY_AUTO = dict.fromkeys(
    ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
)


def adopted(ds: dict[str, Any], *words: str) -> Draft:
    draft = Draft(load_run_config(None, words), DsJson(ds, "ds.json"), World(world_size=2))
    merge_settings(draft)
    assert not list(draft.problems)
    return draft


def optimizer(kind: str | None, **params: Any) -> dict[str, Any]:
    section = {"params": params} if kind is None else {"type": kind, "params": params}
    return {"optimizer": section}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("ds", "words", "optim"),
    [
        # DeepSpeed's Adam decouples weight decay unless adam_w_mode is false.
        (optimizer("AdamW"), (), {"name": "adamw", **ADAMW}),
        (optimizer("adamw", adam_w_mode=False), (), {"name": "adamw"}),
        (optimizer("Adam"), (), {"name": "adamw", **ADAMW}),
        (optimizer("Adam", adam_w_mode=True), (), {"name": "adamw"}),
        (optimizer("Adam", adam_w_mode=False), (), {"name": "adam"}),
        # Missing keys have DeepSpeed's defaults.
        (optimizer("AdamW", lr=2e-5), (), {**ADAMW, "lr": 2e-5}),
        (optimizer("Adam", eps=1e-6), (), {**ADAMW, "eps": 1e-6}),
        (optimizer("AdamW", torch_adam=True), (), {**ADAMW, "weight_decay": 0.01}),
        (optimizer("Adam", torch_adam=True, bias_correction=True), (), {"name": "adamw"}),
        (optimizer("Lion"), (), {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        (optimizer("SGD"), (), {"lr": 1e-3, "momentum_used": 0, "weight_decay": 0.0}),
        (optimizer("SGD", momentum=0.8), (), {"name": "sgd", "momentum": 0.8}),
        (optimizer("Adagrad"), (), {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        (optimizer("Muon"), (),
         {"lr": 3e-3, "momentum_used": 0.95, "eps": 1e-10, "weight_decay": 0.0}),
        (optimizer(None, lr=2e-5), (), {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}),
        (optimizer("AdamW", weight_decay="auto"), (), {**ADAMW, "weight_decay": 0.1}),
        # The user's own values stay.
        (optimizer("AdamW", **AUTO), ("optim.lr=1e-4",), {"lr": 1e-4, "betas": (0.9, 0.95)}),
        (optimizer("AdamW"), ("optim.betas=[0.9,0.98]",), {"betas": (0.9, 0.98)}),
        (optimizer("SGD"), ("optim.name=momentum",), {"name": "momentum", "momentum_used": 0.9}),
        (optimizer("SGD", momentum=0.8), ("optim.name=momentum",), {"name": "momentum"}),
        ({"gradient_clipping": 1, **optimizer(None, betas=[0.9, 0.99])},
         ("optim.clip_norm=1.0", "optim.betas=[0.9,0.99]"), {"clip_norm": 1.0}),
        ({"gradient_clipping": 0.0}, ("optim.clip_value=0.5",), {"clip_value": 0.5}),
        (scheduler("WarmupLR"), (), {"lr": 3e-3, **WARMUP}),
        (scheduler("WarmupDecayLR"), (), {"lr": 1e-3, **WARMUP}),
        (scheduler("WarmupCosineLR"), (), {"lr": 3e-3, "warmup_steps": 1000, "min_lr_ratio": 1e-4}),
        (scheduler("WarmupDecayLR", **DECAY), (),
         {"schedule": "linear", "lr": 3e-5, "warmup_steps": 30, "min_lr_ratio": 0.0,
          "warmup_type": "log"}),
        (scheduler("WarmupCosineLR", **COSINE), (),
         {"schedule": "cosine", "min_lr_ratio": 0.05, "warmup_type": "linear"}),
        (scheduler("WarmupDecayLR", **DECAY_AUTO), ("optim.warmup_steps=7", "optim.lr=1e-4"),
         {"lr": 1e-4, "warmup_steps": 7}),
        (scheduler("WarmupDecayLR"), ("optim.warmup_steps=7", "optim.lr=1e-4"),
         {"lr": 1e-4, "warmup_steps": 7}),
        # An explicit rate is the maximum if the scheduler sets none.
        *(({**optimizer("AdamW", lr=1e-5), **scheduler(kind)}, (), {"lr": 1e-5, "schedule": how})
          for kind, how in SCHEDULES.items()),
        (({**optimizer("AdamW"), **scheduler("WarmupDecayLR")}), (), {"lr": 1e-3}),
        ({**optimizer("AdamW", lr="auto"), **scheduler("WarmupDecayLR")}, ("optim.lr=1e-5",),
         {"lr": 1e-5}),
        ({**optimizer("AdamW", lr="auto"), **scheduler("WarmupDecayLR")}, (), {"lr": 3e-3}),
        # As in DeepSpeed, the scheduler's maximum has priority.
        ({**optimizer("AdamW", lr=1e-3), **scheduler("WarmupLR", warmup_max_lr=1e-4)}, (),
         {"lr": 1e-4}),
    ],
)  # fmt: skip
def test_a_jsons_optimizer_and_schedule_mean_what_deepspeed_makes_of_them(
    ds: dict[str, Any], words: tuple[str, ...], optim: dict[str, Any]
) -> None:
    run = adopted(ds, *words).config
    assert {key: getattr(run.optim, key) for key in optim} == optim
    total = ds.get("scheduler", {}).get("params", {}).get("total_num_steps")
    assert run.train.steps == (None if total == "auto" else total)


def test_what_is_adopted_has_the_jsons_key_as_its_origin() -> None:
    draft = adopted(optimizer("AdamW", lr=3e-5))
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


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("adamw", {"type": "AdamW", "params": {"betas": [0.9, 0.95], "eps": 1e-8}}),
        ("adam",
         {"type": "Adam", "params": {"betas": [0.9, 0.95], "eps": 1e-8, "adam_w_mode": False}}),
        ("sgd", {"type": "SGD", "params": {"momentum": 0.0}}),
        ("momentum", {"type": "SGD", "params": {"momentum": 0.9}}),
    ],
)  # fmt: skip
def test_the_section_that_deepspeed_gets(
    name: str, section: dict[str, Any], planned: Planner
) -> None:
    ds = planned(f"optim.name={name} ds.zero_optimization.stage=2", estimate=False).deepspeed
    params = {**section["params"], "lr": RunConfig().optim.lr, "weight_decay": 0.1}
    if "eps" in params:
        params["torch_adam"] = True  # these ranks are CPUs
    assert ds["optimizer"] == {**section, "params": params}
    assert ds.get("zero_allow_untested_optimizer", False) is ("momentum" in params)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["adamw", "adam", "muon", "sgd"])
def test_torchs_adam_steps_fused_on_gpus_and_deepspeeds_only_on_the_host(
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


@pytest.mark.parametrize("machine", ["", "GPU=h100-80"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_json_may_choose_whether_adam_is_fused(
    machine: str, fused: bool, planned: Planner
) -> None:
    made = planned(machine, optimizer(None, fused=fused), estimate=False)
    assert made.deepspeed["optimizer"]["params"].get("fused", False) is fused


def test_momentum_is_the_usual_one_where_it_is_not_given(planned: Planner) -> None:
    for words, momentum in (("", 0.95), ("optim.momentum=0.0", 0.0)):
        section = planned(f"optim.name=muon {words}", estimate=False).deepspeed["optimizer"]
        assert section["params"]["momentum"] == momentum


def test_the_schedule_is_the_run_configs_or_the_jsons(planned: Planner) -> None:
    words = "optim.schedule=wsd optim.warmup_steps=3 optim.decay_fraction=0.5"
    wsd = OptimConfig(schedule="wsd", warmup_steps=3, decay_fraction=0.5)
    assert planned(words, estimate=False).schedule(100) == Schedule(wsd, 100)
    params = {"total_num_steps": 200, "warmup_num_steps": 10, "cos_min_ratio": 0.01}
    made = planned("optim.lr=1e-4", scheduler("WarmupCosineLR", **params), estimate=False)
    assert made.steps == 200
    cosine = {"schedule": "cosine", "lr": 1e-4, "warmup_steps": 10, "warmup_type": "log"}
    optim = OptimConfig.model_validate({**cosine, "min_lr_ratio": 0.01})
    assert made.schedule(200) == Schedule(optim, 200)


def test_a_missing_package_and_an_offloaded_package_are_named(
    packages: Packages, planned: Planner
) -> None:
    offload = "ds.zero_optimization.stage=2 ds.zero_optimization.offload_optimizer.device=cpu"
    packages("bitsandbytes")
    (problem,) = planned.problems(f"optim.name=adam8bit {offload}")
    assert "remove zero_optimization.offload_optimizer" in problem
    packages("bitsandbytes", none=True)
    (problem,) = planned.problems("optim.name=adam8bit")
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
    assert optimizer_groups(parameters, 0.1, rules, muon=True) == [
        (Group(0.0), ["embed"]),
        (Group(0.1, 0.5, muon=True), ["layer.q"]),
        (Group(0.0, 0.5), ["layer.norm"]),
        (Group(0.3, 2.0), ["head"]),
    ]


def test_muon_leaves_embeddings_and_the_head_to_adamw(planned: Planner) -> None:
    made = planned("optim.name=muon ds.zero_optimization.stage=3")
    parts = model_states(made.estimate.inputs, 0)
    (moments,) = (part.bytes for part in parts if part.component == "moments")
    elements = sum(tensor.numel for tensor in made.shape.tensors())
    assert 4 * elements < moments < 8 * elements
