from __future__ import annotations

import pytest

from harness.config.ds_check import check_keys
from harness.config.ds_json import DsJson
from harness.config.ds_keys import ds_keys
from harness.config.ds_names import first_name
from harness.errors import Problems


def check(ds):
    problems = Problems(ds.look_up)
    check_keys(ds, problems)
    return list(problems)


def complaints(**ds):
    return check(DsJson(ds, "ds.json"))


def checked(tree):
    """Return the rest of a JSON, and the notes."""
    ds = DsJson(tree, "ds.json")
    assert check(ds) == []
    return ds.tree, [event["message"] for event in ds.events]


@pytest.mark.parametrize(
    ("ds", "key", "meant"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"stage3_max_live_params": 1}},
            "zero_optimization.stage3_max_live_params",
            "zero_optimization.stage3_max_live_parameters",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            "zero_optimization.offload_optimizer.devise",
            "zero_optimization.offload_optimizer.device",
        ),
        ({"fp16": {"initial_scale": 1}}, "fp16.initial_scale", "fp16.initial_scale_power"),
        ({"optimizer": {"kind": "Adam"}}, "optimizer.kind", None),
    ],
)
def test_an_unknown_key_at_any_level_comes_with_the_nearest_name(ds, key, meant):
    (problem,) = complaints(**ds)
    hint = f"; did you mean {meant}?" if meant else ""
    assert problem == f"{key} (ds.json) is not a key that DeepSpeed knows{hint}"


@pytest.mark.parametrize(
    ("ds", "expected"),
    [
        ({"train_batch_size": "48"}, "train_batch_size is '48' (ds.json): it must be integer"),
        ({"train_batch_size": 4.5}, "train_batch_size is 4.5 (ds.json): it must be integer"),
        ({"train_batch_size": True}, "train_batch_size is True (ds.json): it must be integer"),
        ({"train_batch_size": -1}, "train_batch_size is -1 (ds.json): it must be at least 1"),
        ({"gradient_clipping": -1.0}, "gradient_clipping is -1 (ds.json): it must be at least"),
        ({"gradient_clipping": 1e999}, "gradient_clipping is inf (ds.json): it must be a finite"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled is 1 (ds.json): it must be boolean"),
        ({"fp16": True}, "fp16 is True (ds.json): it must be an object {...}"),
        ({"zero_optimization": True}, "zero_optimization is True (ds.json): it must be an object"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4 (ds.json): it must be"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
            "zero_optimization.offload_optimizer.device is 'gpu' (ds.json): it must be one of "
            "'none', 'cpu', 'nvme'",
        ),
        ({"data_types": {"grad_accum_dtype": "float8"}}, "data_types.grad_accum_dtype is 'float8'"),
    ],
)
def test_a_value_of_the_wrong_type_or_size(ds, expected):
    (problem,) = complaints(**ds)
    assert problem.startswith(expected)


def test_what_is_wrong_is_taken_out_and_the_rest_stays():
    tree = {"fp16": {"enabled": 1, "loss_scale": 8}, "zero_optimization": {"stage": 2}, "x": 1}
    ds = DsJson(tree, "ds.json")
    assert len(check(ds)) == 2
    assert ds.rejected == {"fp16.enabled", "x"}
    assert ds.tree == {"fp16": {"loss_scale": 8}, "zero_optimization": {"stage": 2}}


def test_what_people_write_is_accepted():
    ds = {
        "train_batch_size": 48.0,
        "gradient_clipping": 1,
        "flops_profiler": {"enabled": True, "module_depth": -1},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 5e8,
            "overlap_comm": "auto",
            "offload_param": None,
            "stage3_prefetch_bucket_size": 5e7,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "anything": [1]}},
    }
    assert complaints(**ds) == []


def test_a_value_set_on_the_command_line_is_refused_as_from_there():
    (problem,) = check(
        DsJson({"zero_optimization": {"stage": 4}}, "ds.json", {"zero_optimization.stage"})
    )
    assert problem.startswith("zero_optimization.stage is 4 (command line)")


@pytest.mark.parametrize(
    ("ds", "left"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        (
            {"zero_optimization": {"max_live_parameters": 1e9, "max_reuse_distance": "auto"}},
            {
                "zero_optimization": {
                    "stage3_max_live_parameters": 10**9,
                    "stage3_max_reuse_distance": "auto",
                }
            },
        ),
        (
            {"zero_optimization": {"gather_16bit_weights_on_model_save": True}},
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
        ),
        ({"tensor_parallel": {"tensor_parallel": {}}}, {"tensor_parallel": {"tp": {}}}),
    ],
)
def test_both_names_of_a_key_are_taken(ds, left):
    assert checked(ds) == (left, [])


def test_every_other_name_of_a_key_leads_to_it():
    def others(section, prefix=""):
        for name, node in section.get("keys", {}).items():
            if "same_as" in node:
                yield prefix + name, prefix + node["same_as"]
            yield from others(node, f"{prefix}{name}.")

    pairs = dict(others(ds_keys()))
    assert len(pairs) > 10
    assert {name: first_name(name) for name in pairs} == pairs


def test_two_names_of_one_key_are_one_too_many():
    zero = {"max_live_parameters": 1, "stage3_max_live_parameters": 2}
    (problem,) = complaints(zero_optimization=zero)
    assert problem == (
        "zero_optimization.stage3_max_live_parameters and zero_optimization.max_live_parameters "
        "(ds.json) are one key: keep one of them"
    )


@pytest.mark.parametrize(
    ("zero", "left", "note"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}, '{"device": "cpu"}'),
        ({"cpu_offload_param": True}, {"offload_param": {"device": "cpu"}}, '"offload_param"'),
        (
            {"stage3_gather_fp16_weights_on_model_save": True},
            {"stage3_gather_16bit_weights_on_model_save": True},
            '"stage3_gather_16bit_weights_on_model_save": true',
        ),
        ({"cpu_offload_use_pin_memory": True}, {}, "left out, an old key"),
    ],
)
def test_an_old_key_is_read_as_deepspeed_reads_it(zero, left, note):
    kept, (message,) = checked({"zero_optimization": zero})
    assert kept == {"zero_optimization": left}
    assert note in message


def test_an_old_key_that_is_off_leaves_nothing():
    assert checked({"zero_optimization": {"cpu_offload": False}}) == (
        {"zero_optimization": {}},
        [],
    )


def test_an_old_key_beside_the_new_one_is_refused():
    (problem,) = complaints(
        zero_optimization={"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}
    )
    assert "zero_optimization.cpu_offload (ds.json) is an old key" in problem


@pytest.mark.parametrize("key", [k for k, n in ds_keys()["keys"].items() if "removed" in n])
def test_what_deepspeed_has_removed_is_refused_in_its_words(key):
    (problem,) = complaints(**{key: {"enabled": True}})
    assert problem.startswith(f"{key} (ds.json): {ds_keys()['keys'][key]['removed']}")
    assert "removed" in problem
    assert "Remove it" in problem


@pytest.mark.parametrize(
    "section",
    [
        {
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}}
            }
        },
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"amp": {"enabled": "auto", "opt_level": "auto"}},
        {"curriculum_learning": {"enabled": False, "params": {"x": 1}}},
        {"sparse_gradients": False},
        {"eigenvalue": {"enabled": False}, "progressive_layer_drop": {"enabled": False}},
    ],
)
def test_what_was_removed_and_is_off_is_left_out_with_a_note(section):
    left, (message,) = checked({**section, "train_batch_size": 4})
    assert left == {"train_batch_size": 4}
    assert message == (
        f"{', '.join(section)} (ds.json): left out, DeepSpeed has removed it, and it is off"
    )


def test_comments_at_any_level_are_left_out_with_one_note():
    ds = {
        "_comment": "stage 2",
        "// author": "me",
        "fp16": {"_why": 1, "enabled": False},
        "optimizer": {"type": "AdamW", "params": {"#": "x"}},
    }
    left, (message,) = checked(ds)
    assert left == {"fp16": {"enabled": False}, "optimizer": {"type": "AdamW", "params": {}}}
    assert message == "_comment, // author, fp16._why, optimizer.params.# (ds.json): a comment"


def test_keys_that_never_did_anything_are_left_out_with_one_note():
    ds = {"bf16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1}}
    left, (message,) = checked(ds)
    assert left == {"bf16": {"enabled": "auto"}}
    assert message == (
        "bf16.loss_scale, bf16.hysteresis, bf16.min_loss_scale (ds.json): left out, bf16 has no "
        "loss scale"
    )


@pytest.mark.parametrize(
    ("ds", "hint"),
    [
        ({"compile": {"backend": "inductor"}}, ": for torch.compile set model.compile=true"),
        ({"offload_optimizer": {}}, "; did you mean zero_optimization.offload_optimizer?"),
        ({"micro_batch_size": 1}, "; did you mean train_micro_batch_size_per_gpu?"),
        ({"attention_config": 1}, ""),
        ({"output_layer_parallelism": 1}, ""),
    ],
)
def test_a_hint_is_near_or_there_is_none(ds, hint):
    (problem,) = complaints(**ds)
    assert f"is not a key that DeepSpeed knows{hint}" in problem
    assert hint or problem.endswith("knows")


def test_many_unknown_keys_are_one_line_with_a_count():
    (problem,) = complaints(**{f"qqq{n}": n for n in range(12)})
    assert problem.startswith("12 keys (ds.json) are none that DeepSpeed knows: qqq0, qqq1, ")
    assert problem.endswith(" and 4 more")
