from __future__ import annotations

from typing import NamedTuple

import pytest

from harness.config.ds_json import DsJson
from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.layout.world import World
from harness.plan.adopt import adopt
from harness.plan.draft import Draft


class Adopted(NamedTuple):
    run: RunConfig
    events: list
    problems: list


def adopted(ds, *assignments):
    draft = Draft(load_run_config(None, assignments), DsJson(ds, "ds.json"), World(world_size=2))
    adopt(draft)
    return Adopted(draft.config, draft.events, list(draft.problems))


def test_a_literal_wins_over_our_default_and_is_an_event():
    params = {"lr": 3e-5, "betas": [0.9, 0.99], "weight_decay": 0.1}
    result = adopted({"optimizer": {"type": "AdamW", "params": params}})
    assert result.problems == []
    assert (result.run.optim.lr, result.run.optim.betas) == (3e-5, (0.9, 0.99))
    assert result.run.origin("optim.lr") == "ds.json: optimizer.params.lr"
    assert result.events == [
        {"kind": "adopted", "key": "optim.lr", "value": 3e-5, "json_key": "optimizer.params.lr"},
        {
            "kind": "adopted",
            "key": "optim.betas",
            "value": (0.9, 0.99),
            "json_key": "optimizer.params.betas",
        },
    ]


def test_a_literal_that_equals_the_default_changes_nothing():
    result = adopted({"gradient_clipping": 1.0, "optimizer": {"params": {"betas": [0.9, 0.95]}}})
    assert result.events == []
    assert result.run.optim == RunConfig().optim


def test_auto_and_absent_leave_the_run_config():
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    ds = {
        "optimizer": {"type": "AdamW", "params": params},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    result = adopted(ds, "optim.lr=1e-4")
    assert result.problems == result.events == []
    assert result.run.optim.lr == 1e-4


def test_every_conflict_with_the_user_is_listed_with_both_values_and_origins():
    ds = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "train_batch_size": 64,
    }
    result = adopted(
        ds, "optim.name=adamw", "optim.lr=1e-3", "optim.clip_norm=1.0", "train.global_batch=48"
    )
    assert [problem.split(":")[0] for problem in result.problems] == [
        "optim.name is 'adamw' (command line), but optimizer.type is 'sgd' (ds.json)",
        "optim.lr is 0.001 (command line), but optimizer.params.lr is 0.01 (ds.json)",
        "optim.clip_norm is 1.0 (command line), but gradient_clipping is 0.5 (ds.json)",
        "train.global_batch is 48 (command line), but train_batch_size is 64 (ds.json)",
    ]


def test_a_user_value_equal_to_the_literal_is_no_conflict():
    ds = {"gradient_clipping": 1, "optimizer": {"params": {"betas": [0.9, 0.99]}}}
    assert adopted(ds, "optim.clip_norm=1.0", "optim.betas=[0.9,0.99]").problems == []


@pytest.mark.parametrize(
    ("kind", "params", "name"),
    [
        ("AdamW", {}, "adamw"),
        ("adamw", {"adam_w_mode": False}, "adamw"),
        ("Adam", {}, "adamw"),
        ("Adam", {"adam_w_mode": True}, "adamw"),
        ("Adam", {"adam_w_mode": False}, "adam"),
        ("SGD", {"momentum": 0.9}, "sgd"),
    ],
)
def test_optimizer_means_what_deepspeed_makes_of_it(kind, params, name):
    """DeepSpeed's Adam decouples weight decay unless adam_w_mode is false."""
    result = adopted({"optimizer": {"type": kind, "params": params}})
    assert result.problems == []
    assert result.run.optim.name == name


@pytest.mark.parametrize("kind", ["Lamb", "OneBitAdam", "MuAdam"])
def test_an_optimizer_that_is_not_built_is_refused_by_name(kind):
    (problem,) = adopted({"optimizer": {"type": kind, "params": {"lr": 1}}}).problems
    assert problem.startswith(f"optimizer.type is '{kind}' (ds.json), which is not built here")
    assert "AdamW, Adam, SGD" in problem


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"weigth_decay": 0.1}, "optimizer.params.weigth_decay (ds.json) is not a parameter known"),
        (
            {"amsgrad": True},
            "optimizer.params.amsgrad is True (ds.json), which is not built: use False",
        ),
        (
            {"max_grad_norm": 1.0},
            "optimizer.params.max_grad_norm is 1 (ds.json), which is not built",
        ),
        ({"lr": -1.0}, "optim.lr is -1 (ds.json: optimizer.params.lr): it must be greater"),
        (
            {"lr": "1e-3"},
            "optim.lr is '1e-3' (ds.json: optimizer.params.lr): it must be a valid number",
        ),
        ({"betas": [0.9]}, "optim.betas"),
    ],
)
def test_a_wrong_optimizer_parameter(params, expected):
    (problem,) = adopted({"optimizer": {"type": "AdamW", "params": params}}).problems
    assert problem.startswith(expected)


def test_parameters_that_the_engine_decides_are_taken():
    ds = {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "bias_correction": True}}}
    assert adopted(ds).problems == []


def test_clipping_by_value_and_a_norm_in_the_json_conflict():
    (problem,) = adopted({"gradient_clipping": 1.0}, "optim.clip_value=0.5").problems
    assert problem.startswith("optim.clip_norm and optim.clip_value exclude each other")
    assert problem.endswith("(command line, ds.json: gradient_clipping)")
    assert adopted({"gradient_clipping": 0.0}, "optim.clip_value=0.5").problems == []


ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("section", "optim"),
    [
        ({"type": "AdamW"}, ADAMW),
        ({"type": "AdamW", "params": {"lr": 2e-5}}, {**ADAMW, "lr": 2e-5}),
        ({"type": "Adam", "params": {"eps": 1e-6}}, {**ADAMW, "eps": 1e-6}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {**ADAMW, "weight_decay": 0.01}),
        ({"type": "Lion"}, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ({"type": "SGD"}, {"lr": 1e-3, "momentum": 0, "weight_decay": 0.0}),
        ({"type": "Adagrad"}, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        ({"type": "Muon"}, {"lr": 3e-3, "momentum": 0.95, "eps": 1e-10, "weight_decay": 0.0}),
        ({"params": {"lr": 2e-5}}, {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}),
        ({"type": "AdamW", "params": {"weight_decay": "auto"}}, {**ADAMW, "weight_decay": 0.1}),
    ],
)
def test_what_an_optimizers_section_leaves_out_is_deepspeeds_default(section, optim):
    result = adopted({"optimizer": section})
    assert result.problems == []
    assert {key: getattr(result.run.optim, key) for key in optim} == optim
    assert result.run.optim.momentum_used == optim.get("momentum", result.run.optim.momentum_used)


def test_a_default_of_deepspeed_is_noted_and_gives_way_to_the_user():
    ds = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
    run, events, problems = adopted(ds, "optim.betas=[0.9,0.98]")
    assert problems == []
    assert run.optim.betas == (0.9, 0.98)
    (event,) = events
    assert (event["key"], event["value"]) == ("optim.weight_decay", 0.0)
    assert event["message"] == (
        "optim.weight_decay = 0.0, DeepSpeed's default for AdamW: the JSON has no "
        "optimizer.params.weight_decay"
    )
    assert run.origin("optim.weight_decay") == "ds.json: DeepSpeed's default for AdamW"


@pytest.mark.parametrize(
    ("kind", "optim"),
    [
        ("WarmupLR", {"lr": 3e-3, "warmup_steps": 1000, "warmup_type": "log"}),
        ("WarmupDecayLR", {"lr": 1e-3, "warmup_steps": 1000, "warmup_type": "log"}),
        ("WarmupCosineLR", {"lr": 3e-3, "warmup_steps": 1000, "min_lr_ratio": 1e-4}),
    ],
)
def test_what_a_schedulers_section_leaves_out_is_deepspeeds_default(kind, optim):
    run, _, problems = adopted({"scheduler": {"type": kind}})
    assert problems == []
    assert {key: getattr(run.optim, key) for key in optim} == optim


def test_momentum_that_the_user_chose_keeps_its_own_default():
    run, _, problems = adopted({"optimizer": {"type": "SGD"}}, "optim.name=momentum")
    assert problems == []
    assert run.optim.momentum_used == 0.9


def test_warmup_decay_is_adopted():
    params = {"warmup_max_lr": 3e-5, "warmup_num_steps": 30, "total_num_steps": 200}
    run, _, problems = adopted({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    optim = run.optim
    assert problems == []
    assert (optim.schedule, optim.lr, optim.warmup_steps) == ("linear", 3e-5, 30)
    assert (optim.min_lr_ratio, optim.warmup_type, run.train.steps) == (0.0, "log", 200)


def test_cosine_is_adopted_with_its_floor_and_its_kind_of_warmup():
    params = {"cos_min_ratio": 0.05, "warmup_type": "linear", "warmup_min_ratio": 0}
    run, _, problems = adopted({"scheduler": {"type": "WarmupCosineLR", "params": params}})
    assert problems == []
    assert (run.optim.schedule, run.optim.min_lr_ratio) == ("cosine", 0.05)
    assert run.optim.warmup_type == "linear"


def test_automatic_and_absent_scheduler_parameters_are_the_run_configs():
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    for params in (dict.fromkeys(names, "auto"), {}):
        ds = {"scheduler": {"type": "WarmupDecayLR", "params": params}}
        run, _, problems = adopted(ds, "optim.warmup_steps=7", "optim.lr=1e-4")
        assert problems == []
        assert (run.optim.lr, run.optim.warmup_steps, run.train.steps) == (1e-4, 7, None)


def test_the_schedulers_maximum_wins_over_the_optimizers_as_in_deepspeed():
    ds = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}},
    }
    assert adopted(ds).run.optim.lr == 1e-4


def test_scheduler_conflicts_with_the_users_schedule():
    ds = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    problems = adopted(ds, "optim.schedule=cosine", "optim.warmup_steps=20").problems
    assert len(problems) == 2
    assert "optim.schedule is 'cosine' (command line), but scheduler.type is" in problems[0]
    assert "scheduler.params.warmup_num_steps is 10" in problems[1]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (
            {"type": "OneCycle"},
            "scheduler.type is 'OneCycle' (ds.json), which is not built here",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup": 1}},
            "scheduler.params.warmup (ds.json) is not a parameter known here",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "exp"}},
            "optim.warmup_type is 'exp' (ds.json: ",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": -1}},
            "optim.warmup_steps is -1 (ds.json: s",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}},
            "scheduler.params.warmup_min_lr is 1e-05 (ds.json), which is not built: use 0",
        ),
    ],
)
def test_a_wrong_scheduler(scheduler, expected):
    (problem,) = adopted({"scheduler": scheduler}).problems
    assert problem.startswith(expected)
