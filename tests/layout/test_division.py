"""A model's part on a tensor-parallel rank by transformers' plans; peft's adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.model_section import LoraConfig
from harness.layout import tensor as tensor_module
from harness.layout.adapters import Adapters
from harness.layout.box import uncovered
from harness.layout.families import FAMILIES
from harness.layout.grid import Grid, Share
from harness.layout.shape import Shape
from harness.layout.tensor import TensorPlan, expert_plan, plan_of, tensor_plan, tensor_shard
from harness.models.adapters import add_adapters
from harness.models.skeleton import hf_config, skeleton
from tests.engine.small import CONFIGS
from tests.gates.generate_plans import OUTPUT, as_text, build_plans
from tests.gates.models import MEASURED
from tests.tables import beside

TABLES = beside(__file__, "division.toml")
SIZES = {**MEASURED["measured"], "num_hidden_layers": 2}
del SIZES["model_type"], SIZES["tie_word_embeddings"]


def shape(model_type: str = "llama", **config: Any) -> Shape:
    return Shape.from_hf({**SIZES, "model_type": model_type, **config})


@pytest.mark.parametrize("row", TABLES["divided"])
def test_linear_layers_are_divided_by_output_or_input(row: dict[str, Any]) -> None:
    part = tensor_shard(shape(**row["config"]), 2)
    divided = {tensor.name: [*tensor.shape] for tensor in part.tensors()}
    expected = {f"{row['layer']}{name}": size for name, size in row["shapes"].items()}
    assert divided == divided | expected | row.get("ends", {})


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    part = tensor_shard(shape(vocab_size=1001), 2)
    assert (part.vocab_size, part.body.before[0].shape) == (1001, (1001, 96))
    assert tensor_shard(shape(), 2).vocab_size == 500


def test_fused_projections_are_divided_piece_by_piece() -> None:
    cuts = plan_of(shape("phi3")).cut("model.layers.0.self_attn.qkv_proj.weight", (160, 96), 1, 2)
    assert cuts == {0: ((48, 96), (112, 128), (144, 160))}


def test_fewer_key_heads_than_ranks_are_shared() -> None:
    plan = plan_of(shape(num_attention_heads=8))
    name = "model.layers.0.self_attn.k_proj.weight"
    shares = [plan.cut(name, (32, 96), place, 4)[0] for place in range(4)]
    assert shares == [((0, 16),)] * 2 + [((16, 32),)] * 2
    assert plan.kv_copies(4) == 2


@pytest.mark.parametrize(
    ("model_type", "config", "ranks", "problem"), TABLES["rows"]["indivisible"]
)
def test_indivisible_layer_error_names_valid_sizes(
    model_type: str, config: dict[str, Any], ranks: int, problem: str
) -> None:
    assert problem in tensor_module.tensor_problems(shape(model_type, **config), ranks)[0]


def test_multi_query_falcon_has_one_key_head_without_its_shape() -> None:
    config = {"model_type": "falcon", "num_attention_heads": 8, "vocab_size": 64}
    assert TensorPlan.of(config).num_kv_heads == 1
    assert TensorPlan.of({**config, "multi_query": False}).num_kv_heads == 8


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("model_type", "config"), TABLES["rows"]["covered"])
def test_tensor_ranks_cover_parameters(model_type: str, config: dict[str, Any], ranks: int) -> None:
    whole = shape(model_type, **{"num_attention_heads": 8, "intermediate_size": 252, **config})
    cutters = {"tensor": plan_of(whole).cut}
    shares = [Share(Grid(ranks, tensor=ranks), rank, cutters) for rank in range(ranks)]
    first = {tensor.name: tensor.shape for tensor in tensor_shard(whole, ranks).tensors()}
    for tensor in whole.tensors():
        name, sizes = tensor.name, tensor.shape
        parts = [share.part(name, sizes) for share in shares]
        assert parts[0].shape == first[name]
        assert {part.numel for part in parts} == {parts[0].numel}
        own = [p for s, p in zip(shares, parts, strict=True) if s.is_first(name, sizes)]
        assert uncovered(own) is None


def test_trained_activation_in_sharded_mlp_sums_its_gradient() -> None:
    plan = TensorPlan.make("apertus", 4, 2, 96)
    assert plan.style_of("model.layers.0.mlp.act_fn") == tensor_module.SUMMED


@pytest.mark.parametrize(
    ("model_type", "problem"),
    [
        ("gpt_oss", "gpt_oss has no usable tensor-parallel plan"),
        ("aria_text", "unknown styles packed_rowwise"),  # the weights of experts are transposed
    ],
)
def test_a_family_without_a_usable_plan_is_named(model_type: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TensorPlan.make(model_type, 4, 2, 96)


@pytest.mark.gate("plan")
def test_the_table_is_what_the_installed_transformers_says() -> None:
    assert Path(tensor_module.__file__).with_name("plans.json") == OUTPUT
    text = OUTPUT.read_text(encoding="utf-8")
    assert text == as_text(), "run python -m tests.gates.generate_plans"
    assert len(text) < 120 * 1024


def test_the_table_holds_plans_that_were_read_in_transformers() -> None:
    """Checked by hand, so that a generator that finds nothing cannot pass."""
    tensor_plan("llama").clear()  # a copy
    llama = tensor_plan("llama")
    assert llama["layers.*.self_attn.q_proj"] == "colwise"
    assert llama["layers.*.mlp.down_proj"] == "rowwise"
    assert expert_plan("llama") is None
    assert expert_plan("mixtral") == {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
    }
    assert tensor_plan("gpt_oss") is None
    for plan in (tensor_plan, expert_plan):
        assert plan("gpt2") is None
        assert plan("no such family") is None


def test_no_family_has_two_plans() -> None:
    built = build_plans()
    for kind, fewest in (("tensor", 100), ("expert", 20)):
        names = [name for entry in built[kind] for name in entry["families"]]
        assert len(names) == len(set(names)) > fewest


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if tensor_plan(name)])
def test_a_plan_names_modules_that_the_family_has(model_type: str) -> None:
    """By the names of families.toml: a pattern is one of them or its beginning."""
    modules = [module.name for module in FAMILIES[model_type].layers]
    for plan in (tensor_plan(model_type), expert_plan(model_type)):
        for pattern in plan or {}:
            name = pattern.removeprefix("layers.*.")
            assert any(f"{module}.".startswith(f"{name}.") for module in modules), pattern


COUNTED = sorted(name for name, config in CONFIGS.items() if name not in ("mamba", "rwkv"))


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("lora", [{"rank": 4}, {"rank": 2, "dora": True}], ids=["lora", "dora"])
def test_adapters_are_those_of_peft(name: str, lora: dict[str, object]) -> None:
    config = LoraConfig.model_validate(lora)
    try:
        shape = Shape.from_hf(CONFIGS[name])
    except ValueError:
        pytest.skip("its parameters are not counted")
    model = skeleton(hf_config(CONFIGS[name]), torch.float32, "eager").to_empty(device="cpu")
    made = {parameter.name for parameter in add_adapters(model, config, 0)}
    adapters = config.adapters
    assert isinstance(adapters, Adapters)
    counted = {tensor.name: tensor.shape for tensor in adapters.tensors(shape)}
    parameters = dict(model.named_parameters())
    assert {name: tuple(parameters[name].shape) for name in made} == counted


def test_targets_are_the_last_parts_of_names() -> None:
    tensors = [*Adapters(4, ("q_proj", "v_proj")).tensors(Shape.from_hf(CONFIGS["llama"]))]
    assert len(tensors) == 3 * 2 * 2
    assert tensors[0].name == "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert (tensors[0].shape, tensors[1].shape) == ((4, 32), (32, 4))
    assert tensors[3].shape == (16, 4)  # two key heads
