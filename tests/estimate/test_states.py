from dataclasses import replace

import pytest

from harness.estimate.activations import saved_for_backward
from harness.estimate.fit import helpful_changes, with_stage
from harness.estimate.host import checkpoint_bytes, communicators, loading
from harness.estimate.memory_item import GIB
from harness.estimate.partition import Flat, piece, sub_groups
from harness.estimate.states import model_states, optimizer_class
from harness.estimate.timeline import estimate_memory
from harness.layout.adapters import Adapters
from harness.layout.grid import Grid
from harness.layout.shape import Tensor
from tests.estimate.runs import run_of
from tests.tables import beside
from tools.memory.text import paper_bytes

TABLES = beside(__file__, "states.toml")


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_match_table_1_of_the_zero_paper(stage, gigabytes):
    """arXiv 1910.02054, table 1: 7.5B parameters on 64 GPUs, decimal gigabytes."""
    assert paper_bytes(7_500_000_000, stage, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("changes", "whole"), TABLES["whole_layers"])
def test_zero_3_takes_layers_as_a_whole_but_where_it_may_not(changes, whole):
    run = run_of(**{"stage": 3, **changes})
    assert run.gathers_layers is whole
    assert not replace(run, adapters=Adapters(4)).gathers_layers


@pytest.mark.parametrize(("precision", "stage", "sums", "per_parameter"), TABLES["between_steps"])
def test_bytes_per_parameter_between_steps(precision, stage, sums, per_parameter):
    keys = {"stage": stage, "grad_accum_dtype": sums, "stage3_param_persistence_threshold": 0}
    run = run_of("llama-1b", precision, **keys)
    state_bytes = sum(part.bytes for part in model_states(run, 0) if "between_steps" in part.phases)
    assert state_bytes / run.parameters == pytest.approx(per_parameter, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "stage", "sums", "offload", "expected", "in_pipeline"), TABLES["classes"]
)
def test_the_class_that_deepspeed_uses(precision, stage, sums, offload, expected, in_pipeline):
    keys = {"precision": precision, "stage": stage, "grad_accum_dtype": sums, "device": offload}
    assert optimizer_class(run_of(**keys)) == expected
    if in_pipeline:
        run = run_of(bounds=(0, 2, 4), **keys)
        assert optimizer_class(run) == optimizer_class(run.of_stage(1)) == in_pipeline


def test_flat_group_is_padded_and_split_even_to_pure_padding():
    flat = Flat((5, 4, 2), shards=2)
    assert (flat.shard, flat.padded) == (6, 12)
    assert flat.whole == (9, 6)  # the second parameter is on both sides of the cut
    assert [flat.end_padding(rank) for rank in range(2)] == [0, 1]
    assert [flat.elsewhere(rank, above=1) for rank in range(2)] == [2, 5]
    flat = Flat((3,), shards=4)
    assert (flat.shard, flat.whole) == (2, (3, 3, 0, 0))
    assert [flat.end_padding(rank) for rank in range(4)] == [0, 1, 2, 2]


def test_sub_groups_close_with_the_parameter_that_fills_them():
    group = [Tensor("a", (10,), "mlp"), Tensor("b", (10,), "mlp"), Tensor("c", (3,), "norm")]
    assert piece(10, 4) == 3
    assert sub_groups([group], shards=1, limit=15) == [20, 3]
    assert sub_groups([group], shards=1, limit=100) == [23]


def test_a_large_embedding_makes_ranks_differ():
    """Reduced gradients are kept as whole parameters."""
    estimate = estimate_memory(run_of("llama-3-8b", ranks=64, stage=2))
    assert len(estimate.ranks) == 2
    assert estimate.ranks[0].phase("gradients_ready")["gradients"] > 2 * 525_000_000
    assert estimate.ranks[0].peak > estimate.ranks[1].peak


@pytest.mark.parametrize(("checkpointing", "gibibytes"), [("none", 26.601), ("full", 3.082)])
def test_llama_3_8b_saves_what_was_traced(checkpointing, gibibytes):
    """The whole model on fake tensors, with one sample of 4,096 tokens and all logits at once."""
    run = run_of("llama-3-8b", seq_len=4096, checkpointing=checkpointing, loss_chunk=0)
    assert saved_for_backward(run) / GIB == pytest.approx(gibibytes, abs=0.002)


@pytest.mark.parametrize(
    ("precision", "stage", "bounds"),
    [("fp32", 0, None), ("bf16", 1, (0, 9, 18)), ("bf16", 3, None), ("fp16", 2, None)],
)
def test_checkpoint_is_12_bytes_per_parameter_in_all_layouts(precision, stage, bounds):
    """tests/test_loop.py compares this with files on disk."""
    run = run_of("llama-1b", precision, stage=stage, bounds=bounds)
    assert estimate_memory(run).checkpoint_bytes == 12 * run.parameters


def test_zero_3_reads_given_weights_a_piece_at_a_time():
    whole, piece = (loading(run_of("llama-1b", stage=n, loads_weights=True))[0] for n in (2, 3))
    assert whole.bytes > piece.bytes


def test_a_save_in_the_background_holds_a_copy_on_the_host():
    run = run_of("llama-1b", stage=2, ranks=4)
    more = replace(run, saves_in_background=True)
    (copy,) = [p for p in estimate_memory(more).worst.parts if p.component == "checkpoint copy"]
    assert (copy.bytes, copy.place) == (12 * run.parameters // 4, "host")
    assert estimate_memory(more).host_bytes_per_node > estimate_memory(run).host_bytes_per_node


TINY = 5_015_232  # parameters


@pytest.mark.parametrize(
    "keys", [{"precision": "fp32"}, {"precision": "bf16"}, {"grad_accum_dtype": "fp32"}]
)
def test_zero_2_holds_its_sums_while_it_accumulates(keys):
    runs = (run_of(stage=2, grad_accum=steps, **keys) for steps in (1, 2))
    once, again = (estimate_memory(run).worst for run in runs)
    assert "gradients" not in once.phase("forward")
    sums = again.phase("forward")["gradients"]
    if "grad_accum_dtype" in keys:
        assert sums == 4 * TINY // 2
        return
    assert sums == once.phase("gradients_ready")["gradients"]
    assert again.phase("backward_last")["gradients"] == 2 * sums


@pytest.mark.parametrize(("keys", "component", "place", "size"), TABLES["optional"])
def test_optional_parts_are_counted(keys, component, place, size):
    (part,) = [p for p in estimate_memory(run_of(**keys)).worst.parts if p.component == component]
    assert (part.bytes, part.place) == (size, place or "device")


def test_checkpoints_lack_frozen_weights_and_widen_8_bit_moments():
    run = replace(run_of(stage=2), adapters=Adapters(4))
    assert run.frozen == TINY
    assert checkpoint_bytes(run) == 12 * run.trained
    assert checkpoint_bytes(run_of(stage=2, type="AdamW8bit")) == 14 * TINY


@pytest.mark.parametrize(("axes", "secondary_ranks", "count"), TABLES["communicators"])
def test_communicators_are_counted(axes, secondary_ranks, count):
    assert communicators(Grid(**axes), secondary_ranks) == count


def test_overlap_doubles_the_bucket():
    once, twice = (
        estimate_memory(run_of(stage=2, overlap_comm=overlap)).worst.phase("backward_last")
        for overlap in (False, True)
    )
    assert twice["gradient buckets"] == 2 * once["gradient buckets"] == 2 * 2 * 500_000_000

    assert run_of(stage=3).zero.overlap_comm  # unless the JSON says otherwise, only stage 3 does
    assert not with_stage(run_of(stage=3), 2).zero.overlap_comm
    assert with_stage(run_of(stage=3, overlap_comm=True), 2).zero.overlap_comm


@pytest.mark.parametrize(
    ("layout", "never"),
    [
        ({}, ()),
        ({"grid": Grid(8, sequence=2)}, ("pipeline",)),
        ({"bounds": (0, 17, 34)}, ("offload", "zero_optimization.stage")),
    ],
)
def test_suggested_changes_save_as_stated_and_can_run(layout, never):
    run = run_of("llama-3-8b", ranks=8, seq_len=8192, stage=1, **layout)
    before = estimate_memory(run, 40 * GIB)
    assert before.verdict == "does not fit"
    changes = helpful_changes(before)
    texts = {change.text for change in changes}
    assert "model.checkpointing=full" in texts
    assert ("ds.zero_optimization.stage=3" in texts) == ("offload" not in never)
    assert not [text for text in texts for part in never if part in text]
    for change in changes:
        assert change.saved_bytes == before.worst.peak - change.estimate.worst.peak > 0
        job = change.estimate.inputs
        assert "GPUs" in change.text or job.grad_accum * job.grid.data == run.grid.data


def test_single_rank_gathers_nothing_and_keeps_no_second_copy():
    names = [
        {part.component for part in estimate_memory(run_of(ranks=ranks, stage=3)).worst.parts}
        for ranks in (1, 2)
    ]
    for name in ("persistent parameters", "gathered parameters"):
        assert [name in components for components in names] == [False, True]


@pytest.mark.parametrize(
    ("keys", "axis", "expected"),
    [({}, "data", 2), ({"communication_data_type": "fp32"}, "data", 4), ({}, "sequence", 2)],
)
def test_gradients_travel_as_the_json_says(keys, axis, expected):
    run = run_of(stage=3, reduce_bucket_size=1000, **keys)
    run = replace(run, grid=Grid(2, **({} if axis == "data" else {axis: 2})))
    (bucket,) = [p for p in estimate_memory(run).worst.parts if p.component == "gradient buckets"]
    assert bucket.bytes == expected * 1000


def test_a_gradient_that_is_widened_is_copied_by_itself():
    keys = {"stage": 1, "reduce_bucket_size": 1000}
    narrow = run_of(**keys)
    wide = run_of(**keys, communication_data_type="fp32")
    largest = max(tensor.numel for tensor in narrow.shape.tensors())
    for run, copy in ((narrow, 2 * 1000), (wide, 4 * largest)):
        assert estimate_memory(run).worst.phase("backward_last")["communication copy"] == copy


@pytest.mark.parametrize(
    ("stage", "sums"), [(0, None), (1, None), (1, "fp32"), (2, "fp32"), (3, None)]
)
@pytest.mark.parametrize(("momentum", "bytes_per_element"), [(0.0, 0), (0.9, 4)])
def test_sgd_has_a_moment_only_with_momentum(stage, sums, momentum, bytes_per_element):
    precision = "fp32" if stage == 0 else "bf16"
    keys = {"stage": stage, "grad_accum_dtype": sums, "params": {"momentum": momentum}}
    run = run_of(precision=precision, **{"type": "SGD", **keys})
    moment_bytes = sum(part.bytes for part in model_states(run, 0) if part.component == "moments")
    shard = run.parameters / (2 if stage else 1)
    assert moment_bytes == pytest.approx(bytes_per_element * shard, rel=0.01)


def test_cpu_rank_bucket_is_at_most_all_gradients() -> None:
    size = {}
    for accelerator in ("cpu", "cuda"):
        estimate = estimate_memory(run_of(stage=2, accelerator=accelerator))
        size[accelerator] = estimate.to_json()["phases"]["reduce"]["gradient buckets"]
    gradients = 4 * estimate.inputs.parameters / GIB
    assert size["cpu"] == pytest.approx(gradients, abs=1e-3)
    assert size["cpu"] < size["cuda"]
