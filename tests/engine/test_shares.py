"""A rank reads, builds and keeps only its share of a model, one piece at a time."""

import functools
import gc
import itertools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.engine import build, reading
from harness.models.skeleton import hf_config
from harness.models.units import units
from tests.engine.engines import WORLD, different, engine_of, folder, gathered
from tests.engine.small import CONFIGS, LARGER, MODEL
from tests.gates.hold import rise
from tests.ranks import ranks

GATE = pytest.mark.gate("engine")


@GATE
@ranks(4)
def test_ranks_that_share_a_key_head_compare_it_among_themselves() -> None:
    own = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}[WORLD.rank]
    engine = engine_of({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}})
    replicas = [*engine.replicated()]
    shared = {r.name for r in replicas if r.ranks == own}
    assert {name.split(".")[-2] for name in shared} == {"k_proj", "v_proj"}
    for replica in replicas:
        assert replica.ranks == (own if replica.name in shared else (0, 1, 2, 3))
        assert tuple(dist.get_process_group_ranks(replica.group)) == replica.ranks


# Tied, fused projections; experts stored one by one; a saved buffer.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**MODEL, "tie_word_embeddings": True},
    "gpt2": {**CONFIGS["gpt2"], "n_layer": 3, "attn_pdrop": 0.0},
    "mixtral": CONFIGS["mixtral"],
    # Its balancing loss cannot be passed across stages.
    "deepseek_v3": {**CONFIGS["deepseek_v3"], "output_router_logits": False},
}


def random_model(name: str) -> PreTrainedModel:
    """Return a model with weights and buffers that no run's seed produces."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(hf_config(MODELS[name]))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += 0.125 * torch.randn_like(tensor)
    return model


@functools.cache
def saved(name: str) -> str:
    """Return the folder of a model's weights. Collective."""
    path = folder() / name
    if WORLD.rank == 0:
        random_model(name).save_pretrained(path)
    dist.barrier()
    return str(path)


def check_given_weights(layout: str, name: str) -> None:
    """Assert that a model's weights and buffers are read exactly, into stages piece by piece."""
    elements, read_weights = [], reading.read_weights

    def watched(*args: Any) -> Any:
        reduced, report = read_weights(*args)
        elements.append(sum(parameter.numel() for parameter in reduced.parameters()))
        return reduced, report

    with mock.patch.object(reading, "read_weights", watched):
        engine = engine_of(layout, model={"name": saved(name), "init_from": saved(name)})
    model = random_model(name)
    assert different(engine.masters(), dict(model.named_parameters())) == []
    built = engine.stage.model if "pipeline2" in layout else engine.module
    own = {n: b.tolist() for n, b in built.named_buffers() if n.endswith("correction_bias")}
    buffers = {key: value for buffers in gathered(own) for key, value in buffers.items()}
    engine.close()
    biases = {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    assert buffers == {key: pytest.approx(b.tolist()) for key, b in biases.items()}
    assert bool(buffers) == (name == "deepseek_v3")
    if "pipeline2" in layout:
        largest = max(sum(p.numel() for *_, p in piece.parameters()) for piece in units(model))
        reads = gathered(elements)
        assert max(map(max, reads)) == largest
        assert all(len(read) in (2, 3, 4) for read in reads)  # of three layers and what is around


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3"])
@ranks(2)
def test_initial_weights_are_loaded_bit_exactly(name: str) -> None:
    check_given_weights("zero3 tensor2", name)


@GATE
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *itertools.product(("zero1 pipeline2 tensor2", "zero3 tensor2"), MODELS),
        *itertools.product(("zero3 experts2",), ("mixtral", "deepseek_v3")),
    ],
)
@ranks(4)
def test_initial_weights_are_loaded_bit_exactly_by_four_ranks(layout: str, name: str) -> None:
    check_given_weights(layout, name)


BUILT = ("zero1 tensor2", "zero3 tensor2", "zero1 pipeline2 tensor2")


@functools.cache
def larger() -> tuple[Path, int]:
    """Return the folder of a larger model, and the bytes of its largest piece. Collective."""
    path = folder() / "larger"
    model = AutoModelForCausalLM.from_config(hf_config(LARGER))
    if WORLD.rank == 0:
        model.save_pretrained(path)
    dist.barrier()
    return path, max(sum(p.nbytes for *_, p in piece.parameters()) for piece in units(model))


def check_peak(layout: str, way: str) -> None:
    """Assert that building takes no more than this rank's share and two layers."""
    path, piece = larger()
    mapped = (path / "model.safetensors").stat().st_size
    model = {"name": str(path), **({"init_from": str(path)} if way == "given" else {})}
    peaks: list[int] = []
    builders = ("build_single_stage", "build_stage")
    measured = {name: _measured(getattr(build, name), peaks, mapped) for name in builders}
    let_go = mock.patch.object(dist, "broadcast", _let_go(dist.broadcast))
    with let_go, mock.patch.multiple(build, **measured):
        engine = engine_of(layout, model=model)
    share = 4 * engine.describe()["elements_held"]
    whole = sum(p.nbytes for p in engine.module.parameters() if p.ndim == 1)  # norms
    dist.barrier()  # gloo's other ranks may still be connecting to this one's groups
    engine.close()
    # An undivided given weight stays in its mapped file.
    least = share - (whole if way == "given" else 0)
    assert least <= peaks[0] <= share + 2 * piece


def _let_go(function: Any) -> Any:
    """Return a collective after which gloo's threads have time to release what they sent."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        time.sleep(0.002)
        return work

    return collective


def _measured(function: Any, peaks: list[int], mapped: int) -> Any:
    def measured(*args: Any) -> Any:
        gc.collect()  # earlier objects must not be freed during the measurement
        with rise(mapped) as highest:
            built = function(*args)
        peaks.append(highest.bytes)
        return built

    return measured


@pytest.mark.parametrize("way", ["drawn", "given"])
@ranks(2)
def test_building_a_rank_needs_its_share_and_two_layers(way: str) -> None:
    check_peak("zero1 tensor2", way)


@GATE
@pytest.mark.parametrize("way", ["drawn", "given"])
@pytest.mark.parametrize("layout", BUILT)
@ranks(4)
def test_building_four_ranks_needs_the_share_of_each(layout: str, way: str) -> None:
    check_peak(layout, way)
