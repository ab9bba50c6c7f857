from __future__ import annotations

import pytest

from harness.config.ds_json import DsJson
from harness.config.ds_keys import value_of
from harness.config.ds_rules import apply_changes, refusals, rules
from harness.errors import worded


def refused(tree, accelerator="cuda"):
    """The problems of every rule that refuses a JSON."""
    ds = DsJson(tree, "ds.json")
    return [
        worded(rule["key"], *ds.look_up(rule["key"]), rule["why"])
        for rule in refusals(ds, accelerator)
    ]


def zero(stage, **section):
    return {"zero_optimization": {"stage": stage, **section}}


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
PIPELINE = {"pipeline": {"stages": 2}}
BF16_STATES = {
    "bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
}


@pytest.mark.parametrize(
    ("ds", "expected"),
    [
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype is 'bf16'"),
        ({**zero(1), "data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype is 'bf16'"),
        ({"torch_autocast": {"enabled": True, "dtype": "half"}}, "torch_autocast.dtype is 'half'"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype is None (ds.json): float16"),
        (
            {**zero(1), **FP16, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "torch_autocast.enabled is True (ds.json): keep one of torch_autocast and fp16",
        ),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is 'sum'"),
        ({**zero(1), "fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale is 0"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is False"),
        (
            {**zero(1), "bf16": {"enabled": True, "check_grad_overflow": False}},
            "bf16.check_grad_overflow is False",
        ),
        (zero(1, compute_grad_norm=False), "zero_optimization.compute_grad_norm is False"),
        (zero(1, legacy_stage1=True), "zero_optimization.legacy_stage1 is True"),
        (
            zero(0, offload_optimizer={"device": "cpu"}),
            "zero_optimization.offload_optimizer.device is 'cpu' (ds.json): it needs stage 1",
        ),
        (
            zero(3, offload_optimizer={"device": "nvme"}),
            "zero_optimization.offload_optimizer.device is 'nvme' (ds.json): it needs zero_optim",
        ),
        (
            zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "zero_optimization.offload_optimizer.ratio is 0.5 (ds.json): below 1 DeepSpeed keeps",
        ),
        (
            zero(2, offload_optimizer={"device": "cpu", "super_offload": True}),
            "zero_optimization.offload_optimizer.super_offload is True (ds.json): what its opt",
        ),
        (
            {**zero(2), **PIPELINE},
            "zero_optimization.stage is 2 (ds.json): ZeRO 2 and 3 partition gradients after",
        ),
        (
            {**zero(0), **BF16, **PIPELINE, "data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype is 'fp32' (ds.json): under pipeline stages it needs",
        ),
        (
            {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}},
            "pipeline.activation_checkpoint_interval is 1 (ds.json): model.checkpointing=full",
        ),
        (
            {"pipeline": {"stages": 2, "seed_layers": True}},
            "pipeline.seed_layers is True (ds.json): weights and dropout are drawn by name",
        ),
        (
            {**zero(1), **FP16, **PIPELINE, "data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype is 'fp32' (ds.json): under pipeline stages with fp16",
        ),
        (
            {**zero(1, offload_optimizer={"device": "cpu"}), **PIPELINE},
            "zero_optimization.offload_optimizer.device is 'cpu' (ds.json): nobody has tried it",
        ),
        (
            {"tensor_parallel": {"vocab_parallel_lm_head": False}},
            "tensor_parallel.vocab_parallel_lm_head is False (ds.json): not built, nor counted",
        ),
        (
            {"tensor_parallel": {"tp": {"tp_grain_size": 64}}},
            "tensor_parallel.tp.tp_grain_size is 64 (ds.json): not built, nor counted",
        ),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled is True (ds.json): not"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is True (ds.json): not built"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing.cpu_checkpointing is True (ds.json): layers are recomputed",
        ),
        (
            zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}),
            "zero_optimization.offload_param.device is 'nvme' (ds.json): not built: what is loaded",
        ),
        (
            zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
            "zero_optimization.offload_optimizer.device is 'nvme' (ds.json): it needs stage 3",
        ),
        (
            zero(
                3,
                offload_optimizer={"device": "nvme", "nvme_path": "/tmp", "pipeline_read": True},
            ),
            "zero_optimization.offload_optimizer.pipeline_read is True (ds.json): nobody",
        ),
        (
            {**zero(2), "bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states is True (ds.json): it needs bf16.bf16_master_weights",
        ),
        (
            {**zero(2), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads is True (ds.json): moments would stay in fp32",
        ),
        (
            {**zero(1), **BF16_STATES, "data_types": {"grad_accum_dtype": "fp32"}},
            "bf16.bf16_master_weights_and_grads is True (ds.json): at stage 1 with sums in fp32",
        ),
        (
            {**zero(2, offload_optimizer={"device": "cpu"}), **BF16_STATES},
            "bf16.bf16_master_weights_and_grads is True (ds.json): nobody has tried it with off",
        ),
        (
            {**zero(1), **BF16_STATES, **PIPELINE},
            "bf16.bf16_master_weights_and_grads is True (ds.json): nobody has tried it under pi",
        ),
        (
            {**zero(2), "bf16": {**BF16_STATES["bf16"], "enabled": False}},
            "bf16.bf16_master_weights_and_grads is True (ds.json): it is for bf16",
        ),
        (
            {**zero(2), "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads is True (ds.json): not built",
        ),
        (
            zero(2, zero_hpz_partition_size=2),
            "zero_optimization.zero_hpz_partition_size is 2 (ds.json): below stage 3",
        ),
        (
            zero(3, zero_hpz_partition_size=2, offload_param={"device": "cpu"}),
            "zero_optimization.zero_hpz_partition_size is 2 (ds.json): it keeps a second copy",
        ),
        (
            zero(1, zero_quantized_weights=True),
            "zero_optimization.zero_quantized_weights is True (ds.json): below stage 3",
        ),
        (
            zero(2, zero_quantized_gradients=True),
            "zero_optimization.zero_quantized_gradients is True (ds.json): below stage 3",
        ),
        (zero(2, zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow is {'topk_ratio': 0.1}"),
    ],
)
def test_what_deepspeed_gets_wrong_or_is_not_built_is_refused(ds, expected):
    (refusal,) = refused(ds)
    assert refusal.startswith(expected)


@pytest.mark.parametrize(
    "ds",
    [
        {},
        zero(0),
        {**zero(3, offload_param={"device": "cpu"}), **BF16},
        {**zero(1), **BF16, "data_types": {"grad_accum_dtype": "float32"}},
        {**zero(1), **FP16},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {**zero(3), **BF16_STATES, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"pipeline": {"stages": "auto"}, "tensor_parallel": {"autotp_size": 2}},
        zero(2, offload_optimizer={"device": "none"}, zenflow=None),
        {**zero(0), **BF16, **PIPELINE},
        {**zero(1), **FP16, **PIPELINE},
        {**zero(1), **BF16_STATES},
        {**zero(2), **BF16_STATES, "data_types": {"grad_accum_dtype": "fp32"}},
        {**zero(3), **BF16_STATES},
    ],
)
def test_what_works_is_not_refused(ds):
    assert refused(ds) == []


@pytest.mark.parametrize(
    ("ds", "key", "value", "message"),
    [
        (
            {**zero(0), **BF16},
            "zero_optimization.stage",
            1,
            "zero_optimization.stage is 1, not 0 (ds.json): at stage 0 with bf16",
        ),
        (FP16, "zero_optimization.stage", 1, "zero_optimization.stage is 1, not 0 (ds.json): at"),
        ({**zero(0), **FP16, **PIPELINE}, "zero_optimization.stage", 1, "at stage 0 with fp16"),
        (
            zero(2, offload_param={"device": "cpu"}),
            "zero_optimization.offload_param.device",
            "none",
            "zero_optimization.offload_param.device is 'none', not 'cpu' (ds.json): below stage 3",
        ),
    ],
)
def test_what_another_value_does_right_is_changed_with_an_event(ds, key, value, message):
    ds = DsJson(ds, "ds.json")
    apply_changes(ds)
    (event,) = ds.events
    assert (event["kind"], event["json_key"]) == ("changed", key)
    assert message in event["message"]
    assert ds.value(key) == value
    assert refused(ds.resolved()) == []


@pytest.mark.parametrize("ds", [zero(0), {**zero(0), **BF16, **PIPELINE}, {**zero(1), **FP16}])
def test_what_is_right_as_it_is_is_not_changed(ds):
    changed = DsJson(ds)
    apply_changes(changed)
    assert changed.events == []
    assert changed.tree == ds


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_what_only_gpus_quantise_is_refused_on_the_cpu(key):
    ds = zero(3, **{key: True})
    (refusal,) = refused(ds, "cpu")
    assert refusal.startswith(
        f"zero_optimization.{key} is True (ds.json): DeepSpeed quantises on G"
    )
    assert refused(ds, "cuda") == []


def test_every_rule_of_refusal_is_about_keys_that_deepspeed_knows():
    for rule in rules():
        assert rule.keys() <= {"key", "why", "when", "unless", "on", "instead"}
        conditions = {**rule.get("when", {}), **rule.get("unless", {})}
        assert conditions, rule
        for key in (rule["key"], *conditions):
            value_of({}, key)
