"""Steps: terms that must be equal, larger or smaller when one thing of a run changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from harness.estimate.inputs import Inputs
from harness.estimate.step_time.machine import Machine, machine_of, measured
from harness.estimate.step_time.step import HOOK_SECONDS, TERMS, StepTime, estimate_time
from harness.estimate.zero_settings import ZeroSettings
from harness.layout.grid import Grid
from harness.layout.shape import Shape, flops_per_token
from harness.layout.stages import split_evenly
from harness.plan.model_config import find_model_config
from tests.estimate.defaults import default_value

MACHINE = replace(machine_of("h100-80", 8, "bf16"), launch_scale=0.2)  # of a quick host


def run(model: str = "llama-1b", **changes: Any) -> Inputs:
    zero = {"type": "AdamW", "stage": changes.pop("stage", 3)}
    return Inputs(
        shape=Shape.from_hf(find_model_config(model)[0]),
        zero=ZeroSettings.read(partial(default_value, **zero)),
        precision="bf16",
        grid=Grid(changes.pop("ranks", 8)),
        gpus_per_node=8,
        **{"micro_batch": 4, "seq_len": 2048, "grad_accum": 4, **changes},
    )


def timed(**changes: Any) -> StepTime:
    return estimate_time(run(**changes), MACHINE)


def test_terms_add_up_and_have_names() -> None:
    step = timed()
    assert [*step.terms] == [*TERMS]
    assert step.seconds == pytest.approx(sum(step.terms.values()))
    assert step.bound == "products"


def test_utilisation_is_that_of_the_products_where_nothing_else_takes_time() -> None:
    step = timed()
    seconds = step.seconds * step.mfu * MACHINE.peak_flops
    flops = flops_per_token(step.inputs.shape, 2048) * step.tokens / 8
    assert seconds == pytest.approx(flops)
    assert 0.3 < step.mfu < MACHINE.products


def test_twice_the_micro_batches_take_twice_as_long_but_for_what_comes_once() -> None:
    one, two = timed(), timed(grad_accum=8)
    for term in ("products", "attention", "elements", "weights"):
        assert two.terms[term] == pytest.approx(2 * one.terms[term])
    assert two.terms["optimizer"] == one.terms["optimizer"]


def test_recomputation_costs_a_forward_pass() -> None:
    none, selective, full = (
        timed(checkpointing=way, loss_chunk=0) for way in ("none", "selective", "full")
    )
    assert none.terms["again"] == 0
    assert 0.2 < full.terms["again"] / full.seconds < 0.27
    assert 0 < selective.terms["again"] < full.terms["again"]
    assert timed().terms["again"] > 0  # logits in chunks are computed twice


def test_hooks_of_zero_3_are_hidden_as_far_as_the_host_is_idle() -> None:
    slow = replace(MACHINE, launch_scale=1.0)

    def launches(machine: Machine, micro_batch: int = 1, **changes: Any) -> float:
        return estimate_time(run(micro_batch=micro_batch, **changes), machine).terms["launches"]

    hooks = 4 * 16 * HOOK_SECONDS[True][0]
    assert launches(slow) == pytest.approx(launches(slow, stage=2) + hooks)  # the host has no rest
    assert 0 < launches(slow, 4) - launches(slow, 4, stage=2) < hooks
    assert launches(MACHINE, 2) == 0


def test_every_term_has_the_evidence_of_its_rates() -> None:
    evidence = timed().to_json()["terms_evidence"]
    assert {*evidence} == {*timed().to_json()["terms_s"]}
    assert evidence["matrix products"] == evidence["gradients reduced"] == "fitted"
    offloaded = run()
    offloaded = replace(offloaded, zero=replace(offloaded.zero, offload_optimizer="cpu"))
    assert estimate_time(offloaded, MACHINE).to_json()["terms_evidence"]["optimizer"] == "guessed"
    rates = {"matmul_tflops": 600.0, "nodes": 1, "all_reduce_gb_per_s": 300.0}
    here = measured(MACHINE, {**rates, "within_node_gb_per_s": 200.0})
    evidence = estimate_time(run(), here).to_json()["terms_evidence"]
    assert evidence["matrix products"] == evidence["weights gathered"] == "measured"
    assert evidence["attention"] == "fitted"


def test_tensor_ranks_divide_products_and_add_sums() -> None:
    whole, divided = run(ranks=8), run(ranks=8)
    divided = replace(divided, grid=Grid(8, tensor=4), zero=replace(divided.zero, stage=1))
    endless = replace(MACHINE, kernel_seconds=0.0)  # a kernel's least is not divided
    one, four = estimate_time(whole, endless), estimate_time(divided, endless)
    assert four.terms["products"] == pytest.approx(one.terms["products"] / 4, rel=0.05)
    assert four.terms["tensor"] > 0
    pairs = machine_of("h100-80", 2, "bf16")
    far = estimate_time(replace(divided, gpus_per_node=2), pairs)
    assert far.terms["tensor"] > 2 * four.terms["tensor"]


def test_a_pipeline_waits_for_its_fill() -> None:
    base = run(stage=1, grad_accum=8)
    layers = base.shape.num_layers
    staged = replace(base, grid=Grid(8, pipeline=4), bounds=split_evenly(layers, 4))
    few, many = (estimate_time(replace(staged, grad_accum=batches), MACHINE) for batches in (4, 32))
    assert few.terms["bubble"] == pytest.approx(many.terms["bubble"])
    assert few.terms["bubble"] / few.seconds > 3 * many.terms["bubble"] / many.seconds


def test_offloaded_states_step_at_the_hosts_pace() -> None:
    base = run(stage=2)
    offloaded = replace(base, zero=replace(base.zero, offload_optimizer="host"))
    assert (
        estimate_time(offloaded, MACHINE).terms["optimizer"]
        > 20 * estimate_time(base, MACHINE).terms["optimizer"]
    )


def test_a_slow_network_shows_in_the_weights_of_zero_3() -> None:
    many = run(ranks=64)
    slow = machine_of("h100-80", 8, "bf16", network_gb_per_s=0.5)
    usual, waiting = estimate_time(many, MACHINE), estimate_time(many, slow)
    assert waiting.bound == "weights"
    assert usual.terms["products"] == waiting.terms["products"]


def test_layouts_that_differ_in_zero_alone_share_what_is_computed() -> None:
    one, three = timed(stage=1), timed(stage=3)
    for term in ("products", "attention", "elements"):
        assert one.terms[term] == three.terms[term]
