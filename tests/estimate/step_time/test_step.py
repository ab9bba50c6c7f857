"""Steps: terms that change with one property of a run; work between tokens, by kind of layer."""

from dataclasses import replace
from typing import Any

import pytest

from harness.estimate.activations import activations
from harness.estimate.inputs import BY_REFERENCE, Inputs, LayerTrace
from harness.estimate.step_time.exchanges import Group, reductions
from harness.estimate.step_time.machine import Machine, cpu_machine, machine_of, measured
from harness.estimate.step_time.step import (
    HOOK_SECONDS,
    TERMS,
    StepTime,
    estimate_time,
    optimizer_seconds,
    synchronised,
)
from harness.layout.adapters import Adapters, Quantization
from harness.layout.attention_table import ATTENTIONS
from harness.layout.grid import Grid
from harness.layout.recompute import Checkpointing, flops_again
from harness.layout.shape import (
    Body,
    Shape,
    Tensor,
    active_parameters,
    flops_per_token,
    parameters_by_kind,
)
from harness.layout.stages import split_evenly
from tests.estimate.runs import run_of

MACHINE = replace(machine_of("h100-80", 8, "bf16"), launch_scale=0.2)  # of a fast host


def run(model: str = "llama-1b", **changes: Any) -> Inputs:
    usual = {"ranks": 8, "stage": 3, "micro_batch": 4, "seq_len": 2048, "grad_accum": 4}
    return run_of(model, **{"gpus_per_node": 8, **usual, **changes})


def timed(**changes: Any) -> StepTime:
    return estimate_time(run(**changes), MACHINE)


def test_step_time_terms_sum_to_the_step() -> None:
    step = timed()
    assert [*step.terms] == [*TERMS]
    assert step.seconds == pytest.approx(sum(step.terms.values()))
    assert step.bound == "products"


def test_mfu_is_that_of_matmuls_if_nothing_else_takes_time() -> None:
    step = timed()
    seconds = step.seconds * step.mfu * MACHINE.peak_flops
    flops = flops_per_token(step.inputs.shape, 2048) * step.tokens / 8
    assert seconds == pytest.approx(flops)
    assert 0.3 < step.mfu < MACHINE.products


def test_twice_the_micro_batches_doubles_all_but_fixed_costs() -> None:
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


@pytest.mark.parametrize(("stage", "share"), [(1, 1), (2, 8)])
def test_sums_of_gradients_are_sharded_from_zero_2_on(stage: int, share: int) -> None:
    one, eight = (
        synchronised(run(stage=stage, ranks=n, grad_accum_dtype="fp32"), 0, MACHINE).accumulated
        for n in (1, 8)
    )
    assert one == pytest.approx([share * seconds for seconds in eight])
    assert min(one) > 0


@pytest.mark.parametrize("way", ["none", "selective", "full", 2, "reversible"])
def test_mlp_tiles_recompute_and_move_the_same_bytes(way: Checkpointing) -> None:
    whole = run(checkpointing=way)
    tiled = replace(whole, mlp_tiles=8)
    one, eight = (estimate_time(each, MACHINE).terms for each in (whole, tiled))
    assert {name for name in one if one[name] != eight[name]} == {"again"}
    exact = replace(MACHINE, memory_rate=1e30, kernel_seconds=0.0, multiprocessors=1)
    one, eight = (estimate_time(each, exact).terms for each in (whole, tiled))
    flops = [sum(flops_again(whole.shape, whole.seq_len, way, tiles)) for tiles in (1, 8)]
    seconds = (flops[1] - flops[0]) * whole.tokens * 4 / (exact.peak_flops * exact.products)
    assert eight["again"] - one["again"] == pytest.approx(seconds)


@pytest.mark.parametrize("way", ["selective", "full", 2])
def test_what_layers_offload_is_copied_out_and_back(way: Checkpointing) -> None:
    kept = run(checkpointing=way)
    moved = replace(kept, activation_offload=True)
    one, other = (estimate_time(each, MACHINE).terms for each in (kept, moved))
    assert one["copies"] == 0
    size = sum(item.bytes for item in activations(moved) if item.place == "host")
    assert other.pop("copies") == pytest.approx(4 * 2 * size / MACHINE.pinned_rate)
    assert one.items() >= other.items()


def test_hooks_of_zero_3_are_hidden_as_far_as_the_host_is_idle() -> None:
    slow = replace(MACHINE, launch_scale=1.0)

    def launches(machine: Machine, micro_batch: int = 1, **changes: Any) -> float:
        return estimate_time(run(micro_batch=micro_batch, **changes), machine).terms["launches"]

    hooks = 4 * 16 * HOOK_SECONDS[True][0]
    assert launches(slow) == pytest.approx(launches(slow, stage=2) + hooks)  # the host never idles
    assert 0 < launches(slow, 4) - launches(slow, 4, stage=2) < hooks
    assert launches(MACHINE, 2) == 0
    assert launches(cpu_machine(8, 8), 4) == launches(cpu_machine(8, 8)) > 0  # it computes itself


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
    endless = replace(MACHINE, kernel_seconds=0.0)  # a kernel's minimum time is not divided
    one, four = estimate_time(whole, endless), estimate_time(divided, endless)
    assert four.terms["products"] == pytest.approx(one.terms["products"] / 4, rel=0.05)
    assert four.terms["tensor"] > 0
    pairs = machine_of("h100-80", 2, "bf16")
    far = estimate_time(replace(divided, gpus_per_node=2), pairs)
    assert far.terms["tensor"] > 2 * four.terms["tensor"]


def test_pipeline_step_time_includes_the_bubble() -> None:
    base = run(stage=1, grad_accum=8)
    layers = base.shape.num_layers
    staged = replace(base, grid=Grid(8, pipeline=4), bounds=split_evenly(layers, 4))
    near, far = (estimate_time(replace(staged, gpus_per_node=n), MACHINE) for n in (4, 2))
    assert far.terms["stages"] > 2 * near.terms["stages"], "a stage's ranks fill a node"
    few, many = (estimate_time(replace(staged, grad_accum=batches), MACHINE) for batches in (4, 32))
    assert few.terms["bubble"] == pytest.approx(many.terms["bubble"])
    assert few.terms["bubble"] / few.seconds > 3 * many.terms["bubble"] / many.seconds


def test_offloaded_optimizer_waits_for_its_share_and_drive() -> None:
    zero = replace(run().zero, offload_optimizer="host")
    whole, half, on_drive = (
        optimizer_seconds(replace(run(), zero=replace(zero, **changes)), MACHINE)
        for changes in ({}, {"offload_ratio": 0.5}, {"offload_optimizer": "nvme"})
    )
    elements = run().sharded_parameters
    assert run(ranks=24).sharded_parameters % 1 == 0, "whole elements"
    assert whole - half == pytest.approx(elements * 30 / MACHINE.host_memory_rate / 2)
    slower = elements * (24 / MACHINE.nvme_rate - 30 / MACHINE.host_memory_rate)
    assert on_drive - whole == pytest.approx(slower)


def test_offloaded_states_step_at_the_hosts_pace() -> None:
    base = run(stage=2)
    offloaded = replace(base, zero=replace(base.zero, offload_optimizer="host"))
    one, other = (estimate_time(each, MACHINE).terms["optimizer"] for each in (base, offloaded))
    assert other > 20 * one


@pytest.mark.parametrize(
    ("keys", "state_bytes"),
    [
        ({"type": "AdamW"}, 4 + 8),
        ({"type": "AdamW8bit"}, 4 + 2 + 8 / 256),
        ({"type": "Adagrad"}, 4 + 4),
        ({"type": "SGD"}, 4),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 4 + 4),
        ({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, 2 + 4),
    ],
)
def test_the_optimizer_reads_and_writes_the_states_that_it_has(
    keys: dict[str, Any], state_bytes: float
) -> None:
    inputs = run(stage=1, **keys)
    moved = optimizer_seconds(inputs, MACHINE) * MACHINE.memory_rate
    gradients = 2 if inputs.zero.half_master else 4
    # And: bf16 gradients for their norm, and master weights that become the model's.
    expected = 2 * state_bytes + gradients + 2 + gradients + 2
    assert moved / (inputs.trained / 8) == pytest.approx(expected, rel=1e-3)


def test_expert_gradients_are_reduced_by_their_own_ranks() -> None:
    """8 GPUs hold each expert once; 16 twice, on different nodes whose groups share the network."""
    machine = replace(MACHINE, link_latency=0.0, network_latency=0.0)
    for ranks in (8, 16):
        grid = Grid(ranks, expert=8)
        inputs = run("qwen3-30b-a3b", grid=grid, stage=1).of_stage(0)
        sizes = parameters_by_kind(inputs.shape)
        experts = sizes.pop("experts")
        others = sum(sizes.values())
        elements = others / ranks + experts / (ranks // 8)
        moved = optimizer_seconds(inputs, machine) * machine.memory_rate
        assert moved / elements == pytest.approx(2 * 12 + 4 + 2 + 4 + 2, rel=1e-3)
        every = Group.of(ranks, 1, 8)
        expected = every.reduce(2 * others, machine)
        expected += (ranks == 16) * 2 * experts / machine.network_rate
        made = reductions(inputs, machine)
        assert made.last == pytest.approx(expected)
        assert made.updated == pytest.approx(expected / 2)


def test_a_slow_network_shows_in_the_weights_of_zero_3() -> None:
    many = run(ranks=64)
    slow = machine_of("h100-80", 8, "bf16", network_gb_per_s=0.5)
    usual, waiting = estimate_time(many, MACHINE), estimate_time(many, slow)
    assert waiting.bound == "weights"
    assert usual.terms["products"] == waiting.terms["products"]
    kept, twice = (reductions(run("tiny", stage3_max_reuse_distance=n), MACHINE) for n in (1e9, 0))
    assert twice.weights == pytest.approx(2 * kept.weights)


def test_zero_stages_share_the_compute_time() -> None:
    one, three = timed(stage=1), timed(stage=3)
    for term in ("products", "attention", "elements"):
        assert one.terms[term] == three.terms[term]


LSTM = (
    Tensor("norm.weight", (1024,), "norm"),
    Tensor("cell.weight_ih", (4096, 1024), "states"),
    Tensor("cell.weight_hh", (4096, 1024), "states"),
    Tensor("out_proj.weight", (1024, 1024), "mlp"),
)
MAMBA = (
    Tensor("mixer.A_log", (16,), "norm"),
    Tensor("mixer.conv1d.weight", (2048, 1, 4), "states"),
    Tensor("mixer.in_proj.weight", (3088, 1024), "states"),
    Tensor("mixer.out_proj.weight", (1024, 1024), "states"),
)


def shape_of(layer: tuple[Tensor, ...], **sizes: Any) -> Shape:
    """Return the shape of a traced model of four such layers."""
    embedding = Tensor("embed.weight", (32000, 1024), "embedding")
    names = ("num_heads", "num_kv_heads", "num_experts", "experts_per_token", "expert_size")
    common = {"model_type": "traced", "vocab_size": 32000, "hidden_size": 1024, "num_layers": 4}
    common |= {"head_dim": 1024, "intermediate_size": 4096, "max_positions": 0, "tied": True}
    common |= {"sliding_windows": (None,) * 4, **dict.fromkeys(names, 1), "num_experts": 0}
    return Shape(**{**common, **sizes}, body=Body((embedding,), "layers.", (layer,) * 4, ()))


def traced(layer: tuple[Tensor, ...], **changes: Any) -> Inputs:
    sizes = changes.pop("sizes", {})
    saved = (changes.pop("bytes", 1e4),) * 4
    trace = LayerTrace(saved, saved, way=changes.pop("way", "traced"))
    return replace(run(**changes), shape=shape_of(layer, **sizes), trace=trace)


def test_recurrent_layer_time_is_per_token_without_attention() -> None:
    short, long = (
        estimate_time(traced(LSTM, micro_batch=1, seq_len=length), MACHINE)
        for length in (1024, 8192)
    )
    assert long.terms["attention"] == 0
    assert long.bound == "serial"
    assert long.terms["serial"] == pytest.approx(8 * short.terms["serial"])
    tokens = 8192 * long.inputs.grad_accum
    slow = estimate_time(long.inputs, replace(MACHINE, launch_scale=20.0))
    assert slow.terms["serial"] / tokens == pytest.approx(4 * 2 * 1e-4)  # layers, passes, a kernel
    many = estimate_time(traced(LSTM, micro_batch=16, seq_len=8192), MACHINE)
    assert many.tokens_per_s_per_gpu > 10 * long.tokens_per_s_per_gpu  # samples run together
    assert long.evidence == "guessed"
    shape = long.inputs.shape
    assert flops_per_token(shape, 8192) == 6 * active_parameters(shape)


def test_a_state_costs_no_more_than_its_kernels_move() -> None:
    """Reference code keeps every state of a scan; its kernel does not."""
    reference, little = (
        estimate_time(traced(MAMBA, bytes=size, way=BY_REFERENCE), MACHINE) for size in (1e9, 1e3)
    )
    assert reference.terms["attention"] == reference.terms["serial"] == 0
    assert 1 < reference.terms["elements"] / little.terms["elements"] < 100
    assert reference.evidence == "guessed"
    assert reference.to_json()["terms_evidence"]["operations on elements"] == "guessed"


def test_expert_flops_count_chosen_experts_of_traced_layers() -> None:
    experts = (Tensor("mlp.experts.up", (64, 4096, 1024), "mlp"),)
    two, all_ = (
        estimate_time(traced(experts, sizes={"experts_per_token": k}), MACHINE) for k in (2, 64)
    )
    assert active_parameters(two.inputs.shape) == 4 * 2 * 4096 * 1024 + 32000 * 1024
    assert 4 < all_.terms["products"] / two.terms["products"] < 32


def test_attention_of_a_latent_vector_is_as_wide_as_its_heads() -> None:
    latent = (
        Tensor("attn.q_b_proj.weight", (16 * 192, 512), "attention"),
        Tensor("attn.kv_b_proj.weight", (16 * 256, 512), "attention"),
        Tensor("attn.o_proj.weight", (1024, 16 * 128), "attention"),
    )
    shape = shape_of(latent)
    scores = flops_per_token(shape, 4096) - 6 * active_parameters(shape)
    assert scores == 4 * 12 * 16 * (192 + 128) / 2 * 4096


@pytest.mark.parametrize("attention", ["longformer", "performer", "reformer"])
def test_attention_time_is_linear_or_quadratic_in_length(attention: str) -> None:
    def seconds(attention: str, length: int) -> float:
        sizes = tuple(ATTENTIONS[attention].sizes.items())
        inputs = run(micro_batch=1, seq_len=length, attention=attention, attention_sizes=sizes)
        return estimate_time(inputs, MACHINE).terms["attention"]

    assert seconds(attention, 65536) == pytest.approx(2 * seconds(attention, 32768))
    assert seconds("sdpa", 65536) == pytest.approx(4 * seconds("sdpa", 32768))


@pytest.mark.parametrize("gpu", ["v100-32", "a100-80", "h100-80", "h20", "l40s", "mi300x"])
def test_utilisation_is_never_above_1(gpu: str) -> None:
    machine = machine_of(gpu, 8, "fp16" if gpu == "v100-32" else "bf16")
    for attention, row in ATTENTIONS.items():
        for length in (2048, 32768, 1 << 20):
            for adapters in (None, Adapters(16)):
                inputs = run(micro_batch=1, seq_len=length, attention=attention, adapters=adapters)
                sizes = tuple(row.sizes.items())
                step = estimate_time(replace(inputs, attention_sizes=sizes), machine)
                share = step.mfu
                if attention == "flash_attention_3":
                    # So fast that MFU's count of masked scores, half of attention, shows.
                    count = adapters.flops_per_token if adapters else flops_per_token
                    counted, linear = (count(inputs.shape, seen) for seen in (length, 0))
                    share *= (counted + linear) / 2 / counted
                assert 0 < share < 1, (attention, length)


def test_frozen_weights_have_no_gradient_in_utilisation() -> None:
    step = estimate_time(run(adapters=Adapters(16)), MACHINE)
    shape, adapters = step.inputs.shape, step.inputs.adapters
    added = sum(tensor.numel for tensor in adapters.tensors(shape))
    attention = flops_per_token(shape, 2048) - 6 * active_parameters(shape)
    flops = 4 * active_parameters(shape) + 6 * added + attention
    assert step.mfu == pytest.approx(flops * step.tokens_per_s_per_gpu / MACHINE.peak_flops)
    assert step.mfu < estimate_time(run(), MACHINE).mfu * 1.1


def test_documents_are_seen_where_a_kernel_is_told_of_them() -> None:
    """With a mask, every score is computed."""
    terms = {}
    for attention in ("sdpa", "varlen", "longformer"):
        sizes = tuple(ATTENTIONS[attention].sizes.items())
        whole = run(attention=attention, attention_sizes=sizes, document_mask=True)
        for seen in (None, whole.seq_len / 8, whole.seq_len):
            inputs = replace(whole, seen_tokens=seen)
            terms[attention, seen] = estimate_time(inputs, MACHINE).terms["attention"]
        short, long = terms[attention, whole.seq_len / 8], terms[attention, whole.seq_len]
        assert long == terms[attention, None]
        if attention == "varlen":
            assert short == pytest.approx(long / 4)
        else:
            assert short <= long
    assert terms["sdpa", None] == terms["sdpa", whole.seq_len / 8]
    assert terms["sdpa", None] == pytest.approx(2 * MACHINE.sdpa * timed().terms["attention"])


@pytest.mark.parametrize(("tokens", "published"), [(130, 1.56), (8_192, 1.05)])
def test_four_bit_weights_cost_time_where_rows_are_short(tokens: int, published: float) -> None:
    """litgpt: 1.56 times at the lengths of Alpaca; Qwen's README: 1.05 times at 8,192 tokens."""
    keys = {"ranks": 1, "seq_len": tokens, "checkpointing": "full"}
    machine, lora = machine_of("a100-80", 1, "bf16"), Adapters(64)
    whole, four_bit = (
        estimate_time(run_of("llama-2-7b", adapters=adapters, **keys), machine).seconds
        for adapters in (lora, replace(lora, quantization=Quantization("nf4")))
    )
    assert four_bit / whole == pytest.approx(published, abs=0.1)
