"""The memory of pipeline stages, against runs of the real engine and manual calculations."""

from dataclasses import replace
from typing import Any

import pytest

from harness.estimate.inputs import Inputs, _layers_alike
from harness.estimate.layer_bytes import layer_activations
from harness.estimate.timeline import estimate_memory, rank_timeline
from harness.layout.shape import Shape
from harness.layout.stages import stage_parameters
from harness.plan.model_config import find_model_config
from tests.estimate.runs import run_of
from tests.gates.models import MEASURED
from tests.tables import beside

SMALL = {**MEASURED["measured"], "num_hidden_layers": 6}
HALVES = (0, 4, 8)


def inputs(
    config: dict[str, Any], bounds: tuple[int, ...], precision: str = "bf16", **keys: Any
) -> Inputs:
    small = {"ranks": 4, "grad_accum": 4, "seq_len": 16, "stage": 1, "accelerator": "cpu"}
    return run_of(config, precision, bounds=bounds, **{**small, **keys})


def bytes_in(run: Inputs, rank: int, phase: str) -> int:
    """Return the bytes on a CPU rank, without the process itself."""
    timeline = rank_timeline(run, rank)
    host = timeline.phase(phase, "host")
    return timeline.total(phase) + sum(host.values()) - host["process"]


def test_checkpointed_layers_of_a_stage_count_from_the_first() -> None:
    shape = Shape.from_hf({**SMALL, "num_hidden_layers": 4})
    assert _layers_alike(shape, 3, 0, None) == [[0, 3], [1, 2]]
    assert _layers_alike(shape, 3, 4, None) == [[0, 1, 3], [2]]  # 6 of 4 to 7


@pytest.mark.parametrize(
    ("precision", "stage", "sums", "bounds", "accumulated", "tied", "first", "last"),
    beside(__file__, "pipeline.toml")["measured"],
)
def test_states_are_those_of_real_runs(
    precision, stage, sums, bounds, accumulated, tied, first, last
):
    keys = {"grad_accum": accumulated, "stage": stage, "grad_accum_dtype": sums}
    config = {**SMALL, "tie_word_embeddings": tied}
    run = inputs(config, tuple(bounds), precision, reduce_bucket_size=20_000, **keys)
    for rank, measured in ((0, first), (3, last)):
        phases = ("built", "gradients_ready", "between_steps")
        assert [bytes_in(run, rank, phase) for phase in phases] == pytest.approx(measured, rel=1e-3)


def llama_3_8b(**keys: Any) -> Inputs:
    """Return a run with 8, 9, 9 and 6 layers on 16 ranks of two nodes."""
    config, _ = find_model_config("llama-3-8b")
    run = {"ranks": 16, "grad_accum": 16, "seq_len": 4096, "gpus_per_node": 8, **keys}
    return inputs(config, (0, 9, 18, 27, 34), grad_accum_dtype="fp32", **run)


def test_pipeline_stage_holds_activations_in_flight():
    """Calculated as layers x micro-batches in flight x bytes per layer."""
    run = llama_3_8b()
    layer = layer_activations(run, 0)
    for stage, (layers, in_flight) in enumerate([(8, 4), (9, 3), (9, 2), (6, 1)]):
        sizes = rank_timeline(run, 4 * stage).phase("backward_first")
        assert sizes["activations: mlp"] == layers * in_flight * layer.mlp
    few = rank_timeline(replace(run, grad_accum=2), 0).phase("backward_first")
    assert few["activations: mlp"] == 8 * 2 * layer.mlp


def test_stage_gradients_exist_at_peak_if_more_batches_follow():
    fp32 = {"precision": "fp32", "stage": 0}
    assert "gradients" in rank_timeline(llama_3_8b(**fp32), 0).phase("forward")
    assert "gradients" not in rank_timeline(llama_3_8b(grad_accum=4, **fp32), 0).phase("forward")
    assert "gradients" in rank_timeline(llama_3_8b(grad_accum=4, **fp32), 12).phase("forward")
    assert "gradients" not in rank_timeline(llama_3_8b(), 0).phase("forward")  # bf16: in sums


def test_only_the_last_stage_has_logits():
    run = llama_3_8b()
    for rank in range(16):
        assert ("logits and loss" in rank_timeline(run, rank).phase("loss")) is (rank >= 12)


def test_what_travels_between_stages_is_kept_while_in_flight():
    """(1, 4096, 4096) in bf16 is 32 MiB; the last stage keeps two inputs and their gradients."""
    run, stream = llama_3_8b(), 32 * 2**20
    first, second, last = (rank_timeline(run, rank).phase("backward_last") for rank in (0, 4, 12))
    assert "pipeline: inputs" not in first
    assert first["pipeline: outputs"] == 4 * stream
    assert second["pipeline: inputs"] == second["pipeline: outputs"] == 3 * stream
    assert "pipeline: outputs" not in last
    assert last["pipeline: inputs"] == 4 * stream


def test_an_estimate_has_every_stage_and_its_ranks_that_differ():
    estimate = estimate_memory(llama_3_8b())
    ranks = estimate.to_json()["ranks"]
    assert [(r["rank"], r["pipeline_stage"], r["data_rank"]) for r in ranks] == [
        (4 * stage, stage, 0) for stage in range(4)
    ]
    assert estimate.worst is estimate.ranks[0]
    assert sum(rank.inputs.parameters for rank in estimate.ranks) == 8_030_261_248
    differing = estimate_memory(inputs(SMALL, HALVES, ranks=8)).ranks
    assert [rank.stage for rank in differing] == [0, 0, 1, 1]


def test_a_tied_embedding_is_on_both_ends():
    config = {**SMALL, "tie_word_embeddings": True}
    run = inputs(config, (0, 2, 6, 8), ranks=3)
    parameters = stage_parameters(run.shape, run.bounds)
    embedding = 1000 * 96
    layers = [run.of_stage(stage).shape.num_layers for stage in range(3)]
    assert layers == [1, 4, 1]
    assert parameters[0] > embedding < parameters[2]
    assert sum(parameters) == run.parameters + embedding


def test_a_node_holds_the_ranks_of_neighbouring_stages():
    """Two nodes of 8: stages 0 and 1 on the first, 2 and 3 on the second."""
    estimate = estimate_memory(llama_3_8b())
    host = [rank.most("host") for rank in estimate.ranks]
    assert estimate.host_bytes_per_node == max(4 * host[0] + 4 * host[1], 4 * host[2] + 4 * host[3])
    alone = estimate_memory(llama_3_8b(gpus_per_node=4))
    assert alone.host_bytes_per_node == 4 * max(host)


def test_the_reduction_makes_a_second_bucket():
    run = inputs(SMALL, HALVES, "fp32", reduce_bucket_size=20_000)
    buckets = [
        rank_timeline(run, 0).phase(phase).get("gradient buckets")
        for phase in ("forward", "backward_last", "reduce", "gradients_ready")
    ]
    assert buckets == [80_000, 80_000, 160_000, None]
    overlapping = replace(run, zero=replace(run.zero, overlap_given=True))
    assert rank_timeline(overlapping, 0).phase("reduce")["gradient buckets"] == 160_000
