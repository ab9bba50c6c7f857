"""Tensor, sequence, expert and pipeline parallelism: the part of each rank."""

import pytest

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.stages import layers_per_stage
from harness.layout.world import World
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.plan.text import summary
from tests.gates.models import LEARNED
from tests.plan.plans import Planner
from tests.tables import beside

TENSORS = "ds.tensor_parallel.autotp_size=2"
ROWS = "ds.sequence_parallel_size=2"
STAGES = "ds.pipeline.stages=2"
EXPERTS = "ds.zero_optimization.stage=1 ds.expert_parallel.enabled=true"
MIXTURE = f"RANKS=4 model.name=$mixtral data.seq_len=32 {EXPERTS} ds.expert_parallel.autoep_size=2"
WEIGHT = "model.layers.0.mlp.experts.down_proj"
GPT2 = "model.name=gpt2-124m data.seq_len=1024 ds.zero_optimization.stage=1"


@pytest.mark.parametrize(("line", "sizes"), beside(__file__, "layouts.toml")["divided"])
def test_ranks_are_divided_once(line: str, sizes: list[int], planned: Planner) -> None:
    words = {"TENSORS": TENSORS, "ROWS": ROWS, "STAGES": STAGES, "MIXTURE": MIXTURE}
    made = planned(line.format(**words))
    grid = made.grid
    assert [grid.data, grid.sequence, grid.tensor, grid.expert, grid.pipeline] == sizes
    keys = {"tensor_parallel", "sequence_parallel_size", "expert_parallel"}
    assert not keys & made.deepspeed.keys()
    assert (made.stages is None) is (grid.pipeline == 1)
    assert made.estimate is not None


def test_a_rank_has_a_part_of_each_tensor_and_row(planned: Planner) -> None:
    share = planned(f"RANKS=4 {TENSORS}").share
    assert share.part("lm_head.weight", (8192, 192)).shape == (4096, 192)
    made = planned(f"RANKS=4 {ROWS} train.global_batch=8")
    assert made.share.positions(512) == (0, 256)
    # DeepSpeed treats the ranks of a row as data ranks.
    assert made.deepspeed["train_batch_size"] == 2 * made.global_batch == 16


def test_neighbours_share_the_experts(planned: Planner) -> None:
    def on_rank_1(ds: dict[str, object]) -> Plan:
        words = [f"model.name={planned.add('mixtral', LEARNED['mixtral'])}", "data.seq_len=32"]
        experts = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
        ds = {"zero_optimization": {"stage": 1}, **experts, **ds}
        return make_plan(load_run_config(None, words), ds, World(1, 4, 1, 4))

    share = on_rank_1({}).share
    assert share.part(WEIGHT, (4, 48, 96)).ranges[0] == ((2, 4),)
    assert share.part("model.layers.0.mlp.gate.weight", (4, 48)).is_whole
    assert share.every("experts") == ((0, 1), (2, 3))
    assert share.every("expert_replicas") == ((0, 2), (1, 3))
    assert share.holders(WEIGHT, (4, 48, 96)) == "expert_replicas"
    assert share.holders("lm_head.weight", (128, 48)) == "replicas"
    # With tensor parallelism, experts are divided by number and by width.
    share = on_rank_1({"tensor_parallel": {"autotp_size": 2}}).share
    assert share.part(WEIGHT, (4, 48, 96)).ranges == (((0, 2),), ((0, 48),), ((48, 96),))
    assert share.every("experts") == ((0, 2), (1, 3))
    assert share.every("expert_parts") == ((0, 1, 2, 3),)


def test_an_estimate_of_what_is_not_built_is_refused_too() -> None:
    ds = {"pipeline": {"stages": 2}, "sequence_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"cannot be combined with pipeline\.stages=2"):
        make_plan(load_run_config(None), ds, World(0, 4, 0, 4), estimating=True)


def test_indivisible_vocabulary_note_names_next_size_and_gain(planned: Planner) -> None:
    line = f"RANKS=2 model.name=gpt2-124m train.global_batch=8 {TENSORS}"
    whole, divided = planned(line), planned(f"{line} model.overrides.vocab_size=50258")
    (event,) = whole.events
    # The tied embedding and head: half of the rows, except the added one.
    elements = (50_257 // 2) * 768
    assert f"adds {elements:,} parameters" in event["message"]
    assert f"note           {event['message']}" in summary(whole)
    saved = whole.estimate.worst.peak - divided.estimate.worst.peak
    assert event["bytes"] == saved
    assert saved > 4 * 4 * elements  # weights, gradients and both moments in fp32


def layers(made: Plan) -> tuple[int, ...]:
    return layers_per_stage(made.stages)


def test_stages_balanced_by_memory_minimise_the_fullest_rank(planned: Planner) -> None:
    def peak(partition: str) -> int:
        batch = "train.micro_batch=2 train.global_batch=16"
        line = f"RANKS=6 {GPT2} ds.pipeline.stages=3 {batch} 'ds.pipeline.partition={partition}'"
        estimate = planned(line).estimate
        return estimate.worst.peak

    splits = [f"[{a}, {b}, {12 - a - b}]" for a in range(1, 11) for b in range(1, 12 - a)]
    assert peak("memory") == min(map(peak, splits)) < peak("time")


def test_layers_per_stage_may_be_given(planned: Planner) -> None:
    partition = "'ds.pipeline.partition=[3, 3.0, 3, 3]'"
    made = planned(f"RANKS=4 {GPT2} ds.pipeline.stages=4 {partition}")
    assert made.to_json()["stages"] == made.stages == (0, 4, 7, 10, 14)
    one = "ds.pipeline.stages=1 'ds.pipeline.partition=[12]'"
    assert planned(f"RANKS=4 {GPT2} {one}").stages is None


def test_an_unknown_architecture_is_split_evenly(planned: Planner) -> None:
    config = {"model_type": "brand_new", "hidden_size": 8, "num_hidden_layers": 5}
    line = f"RANKS=4 model.name={planned.add('brand_new', config).parent} {STAGES}"
    made = planned(line, estimate=False)
    assert layers(made) == (3, 2)
    kinds = [event["kind"] for event in made.events]
    assert kinds == ["unknown_architecture", "learning_rate", "even_split"]
    partition = "'ds.pipeline.partition=[1, 4]'"
    assert layers(planned(f"{line} {partition}", estimate=False)) == (1, 4)
