"""Building: the same weights in every layout, and never more than one whole piece at a time."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from harness.config.ds_json import read_ds_json
from harness.config.run_config import RunConfig
from harness.engine import single_stage
from harness.engine.fragments import grad_norm, is_copy, note_copies, part_of
from harness.engine.meta_model import empty_model
from harness.engine.reading import read_weights
from harness.errors import ConfigError
from harness.layout.box import Part, Range, share_of
from harness.layout.grid import Grid, Share
from harness.layout.world import World
from harness.models.skeleton import hf_config, skeleton
from harness.models.units import units
from harness.plan.command import parse_command, plan_from
from harness.plan.make import make_plan, with_facts
from harness.plan.plan import Facts
from tests.engine.engines import WORLD, different, engine_of, folder, given_weights, losses
from tests.engine.small import BIASED, CONFIGS, MODEL
from tests.ranks import ranks
from tests.run_tools import printed
from tests.shipped import DS_CONFIGS
from tests.tables import beside

TABLES = beside(__file__, "build.toml")


@ranks(2)
def test_zero_3_build_holds_one_full_layer_at_most() -> None:
    """Count the whole parameter elements on this rank before and after each piece is divided."""
    elements: list[int] = []
    materialize = single_stage.materialize

    def watched(model: Any, *args: Any, placed: Any, **kwargs: Any) -> None:
        def place(parameters: list[Any]) -> None:
            for step in (lambda: None, lambda: placed(parameters)):
                step()
                elements.append(sum(p.numel() for p in model.parameters() if not p.is_meta))

        materialize(model, *args, placed=place, **kwargs)

    with mock.patch.object(single_stage, "materialize", watched):
        engine = engine_of("zero3")
    own = sum(parameter.ds_tensor.numel() for parameter in engine.module.parameters())
    total = sum(parameter.ds_numel for parameter in engine.module.parameters())
    pieces = units(skeleton(hf_config(MODEL), torch.float32))
    largest = max(sum(parameter.numel() for *_, parameter in p.parameters()) for p in pieces)
    assert max(elements[::2]) == largest < total / 3
    assert max(elements[1::2]) == 0
    assert own == pytest.approx(total / 2, rel=0.01)


def test_zero3_moves_the_buffers_of_a_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """zero.Init has placed its parameters; another device shows who moves the buffers."""
    loaded = AutoModelForCausalLM.from_config(hf_config(MODEL))
    report = {"missing_keys": [], "unexpected_keys": []}
    monkeypatch.setattr(single_stage, "read_weights", lambda *_: (loaded, report))
    plan = mock.Mock(zero_stage=3, deepspeed={"zero_optimization": {"stage": 3}})
    model, _ = single_stage._load(plan, loaded, torch.device("meta"), trust_remote_code=False)
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero3", "zero1 pipeline2"])
@ranks(2)
def test_given_weights_are_loaded_exactly(layout: str) -> None:
    engine = engine_of(layout, model={"init_from": str(folder() / "given")})
    assert different(engine.masters(), given_weights()) == []
    assert "unused_weights" not in {event["kind"] for event in engine.events}


@pytest.mark.parametrize("layout", ["zero0 bf16", "zero1 fp16", "zero2 bf16 fp32_sums"])
@ranks(2)
def test_a_bias_of_routers_stays_fp32(layout: str) -> None:
    """The model freezes it, so that weight decay leaves it alone. bf16 and fp16 round off 2^-12."""
    path = folder() / "ernie"
    model = AutoModelForCausalLM.from_config(hf_config(BIASED["ernie4_5_moe"]))
    biases = {name: p for name, p in model.named_parameters() if "e_score_correction" in name}
    for bias in biases.values():
        bias.data.fill_(1 + 2**-12)
    if WORLD.rank == 0:
        model.save_pretrained(path)
    dist.barrier()
    engine = engine_of(layout, model={"name": str(path), "init_from": str(path)})
    losses(engine, 1)
    assert different(((n, w) for n, w in engine.masters() if n in biases), biases) == []


class _Model:
    shows: bool

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> tuple[Any, dict[str, Any]]:
        cls.shows = logging.is_progress_bar_enabled()
        return SimpleNamespace(generation_config=None), {"mismatched_keys": set()}


@pytest.mark.parametrize("rank", [0, 1])
def test_weight_loading_bar_is_shown_by_rank_0_only(rank: int) -> None:
    logging.enable_progress_bar()
    sdpa: dict[str, Any] = {"attention": "sdpa", "attention_sizes": {}}
    model = SimpleNamespace(init_from="weights", name="tiny", **sdpa)
    own = SimpleNamespace(given={})
    config = SimpleNamespace(model=model, train=SimpleNamespace(seed=0), own=own)
    plan: Any = SimpleNamespace(config=config, world=SimpleNamespace(rank=rank))
    empty: Any = SimpleNamespace(config=None, dtype=torch.float32, generation_config=None)
    try:
        read_weights(_Model, plan, empty, trust_remote_code=False)
    finally:
        logging.enable_progress_bar()
    assert _Model.shows is (rank == 0)


@pytest.mark.parametrize(("family", "data", "is_refused"), TABLES["document_masks"])
def test_document_mask_is_required_where_boundaries_matter(
    family: str, data: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    """A way out that the message names is taken."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    tree = {"model": {"name": str(tmp_path)}, "data": {"seq_len": 16, **data}}
    plan = make_plan(RunConfig.model_validate(tree), {}, World())
    mask = data.get("document_mask", True)
    if not is_refused:
        assert empty_model(plan, trust_remote_code=False, document_mask=mask)
        return
    for refused in (
        lambda: empty_model(plan, trust_remote_code=False, document_mask=mask),
        lambda: with_facts(plan, Facts(has_documents=mask)),  # as in a dry run
    ):
        with pytest.raises(ConfigError, match="opt models ignore document boundaries") as caught:
            refused()
        for word in ("data.batching=padded", "data.document_mask=false"):
            assert word in str(caught.value)


@ranks(2)
def test_without_a_compiler_offload_names_the_package_to_install() -> None:
    refused = pytest.raises(ConfigError, match=r"apt install g\+\+")
    with mock.patch.dict(os.environ, CXX="/nonexistent/c++"), refused:
        engine_of("zero2 offload")


@pytest.mark.parametrize(("name", "keys", "optim"), TABLES["jsons"])
@ranks(2)
def test_the_engine_changes_nothing_of_the_plans_json(
    name: str, keys: dict[str, Any], optim: dict[str, Any]
) -> None:
    import deepspeed

    received, initialize = [], deepspeed.initialize

    def spied(**arguments: Any) -> Any:
        received.append(json.dumps(arguments["config"]))  # DeepSpeed may change it
        return initialize(**arguments)

    ds = {**read_ds_json(DS_CONFIGS / f"{name}.json"), "bf16": {"enabled": False}, **keys}
    with mock.patch.object(deepspeed, "initialize", spied):
        engine = engine_of(ds, optim=optim)
    assert [json.loads(text) for text in received] == [engine.plan.to_json()["deepspeed"]]


@pytest.mark.parametrize(("word", "said"), TABLES["unbuildable"])
def test_what_transformers_cannot_build_is_one_report(word: str, said: str) -> None:
    plan = plan_from(parse_command([word]), {"DS_ACCELERATOR": "cpu"})
    with pytest.raises(ConfigError) as caught:
        empty_model(plan, trust_remote_code=False)
    (problem,) = caught.value.problems
    assert problem.startswith("model.name=tiny: transformers cannot build it: ")
    assert said in problem
    assert problem.endswith(f"(model.overrides: {word.split('.')[2].partition('=')[0]})")


@pytest.mark.gate("engine")
@pytest.mark.parametrize(("value", "precision"), [("1", "TF32"), (None, "fp32")])
def test_tf32_use_is_an_event(value: str | None, precision: str, monkeypatch) -> None:
    monkeypatch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", value)
    code = "from harness.engine.build import float32_products as event; print(event()['message'])"
    assert printed(code).startswith(f"fp32 matrix products run in {precision}")


def halves(share: Share) -> nn.Module:
    """Return a matrix whose rows are divided over ranks, and a norm on both."""
    module, part = nn.Module(), share.part("cut", (4, 2))
    module.cut, module.norm = (nn.Parameter(torch.ones(shape)) for shape in (part.shape, 3))
    module.cut.part = part  # type: ignore[attr-defined]
    note_copies(module, share)
    return module


def test_shards_are_told_from_whole_parameters_and_their_copies() -> None:
    """The first rank saves what both have; squares of all ranks add up to those of the whole."""

    def by_rows(name: str, shape: Any, place: int, places: int) -> dict[int, tuple[Range, ...]]:
        return {0: share_of(shape[0], place, places)} if name == "cut" else {}

    grid, squares = Grid(2, tensor=2), 0.0
    for rank in range(2):
        module = halves(Share(grid, rank, {"tensor": by_rows}))
        assert part_of(module.norm) == Part.of((3,))
        assert part_of(module.cut).ranges[0] == ((2 * rank, 2 * rank + 2),)
        assert [is_copy(module.cut), is_copy(module.norm)] == [False, rank == 1]
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        squares += grad_norm(module, None, torch.device("cpu")).item() ** 2
    assert squares == pytest.approx(4 * (8 + 3), rel=1e-6)


def test_no_parameter_is_a_replica_without_a_sharing_axis() -> None:
    module = nn.Linear(2, 3)
    note_copies(module, Share(Grid(4, pipeline=2), 3))
    assert not any(map(is_copy, module.parameters()))
    module.bias.ds_pipe_replicated = True  # type: ignore[attr-defined]
    assert is_copy(module.bias)
