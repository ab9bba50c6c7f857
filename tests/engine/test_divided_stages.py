"""Pipeline stages with divided tensors on four ranks: the same weights, steps and texts, about a
quarter of the model each.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.models.pieces import pieces
from harness.models.skeleton import hf_config
from tests.engine.results import Result, results_of
from tests.engine.small import MODEL
from tests.two_ranks import Ended, run_ranks

pytestmark = pytest.mark.slow

RANKS = 4
KEYS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 16,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.0,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
"""Of models whose weights are given."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided-stages")
    (folder / "config.json").write_text(json.dumps(MODEL))
    for name, keys in KEYS.items():
        saved_model(name, keys).save_pretrained(folder / name)
    saved_model("llama", {}).save_pretrained(folder / "incomplete")
    weights = load_file(folder / "incomplete" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "incomplete" / "model.safetensors", metadata={"format": "pt"})
    return folder


def saved_model(name: str, keys: dict[str, Any]) -> PreTrainedModel:
    """A model with weights and buffers that no seed of a run gives."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(hf_config({**MODEL, "model_type": name, **keys}))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += 0.125 * torch.randn_like(tensor)
    return model


@pytest.fixture(scope="module")
def ended(folder: Path) -> Ended:
    command = [sys.executable, "-m", "tests.engine.divided_stage_checks", folder]
    return run_ranks(command, folder, RANKS)


@pytest.fixture(scope="module")
def result(ended: Ended, folder: Path) -> Result:
    """Return a check's result on each rank."""
    return results_of(ended, folder, RANKS)


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_start_from_the_weights_that_one_process_draws(
    zero: int, result: Result, folder: Path, drawn_weights: dict[str, torch.Tensor]
) -> None:
    result("weights")
    saved = load_file(folder / f"divided-initial-{zero}.safetensors")
    assert saved.keys() == drawn_weights.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in drawn_weights.items())


@pytest.mark.parametrize("zero", [0, 1])
def test_each_rank_holds_its_part_of_its_stage(zero: int, result: Result) -> None:
    ranks = [rank[str(zero)] for rank in result("weights")]
    assert [rank["pipeline_stage"] for rank in ranks] == [0, 0, 1, 1]
    undivided = ranks[0]["undivided"] + ranks[2]["undivided"]
    elements = [rank["elements_held"] for rank in ranks]
    assert sum(elements) == ranks[0]["whole"] + undivided  # norms are on both ranks of a stage
    for rank in ranks:
        assert rank["elements_held"] == rank["expected"]  # by the boxes of the layout


def test_zero_3_shares_out_what_tensor_ranks_hold(result: Result) -> None:
    for rank in result("tensor_shares"):
        assert rank["held"] == rank["expected"]
        divided = rank["whole"] - rank["undivided"]
        assert rank["held"] == divided // (2 * 2) + rank["undivided"] // 2


def test_no_rank_builds_with_more_than_its_share_and_two_layers(result: Result) -> None:
    for rank in result("building"):
        for way, built in rank.items():
            # A given weight that is not cut stays where its file is mapped.
            least = built["share"] - (built["whole"] if way.endswith("given") else 0)
            assert least <= built["peak"] <= built["share"] + 2 * built["piece"], (way, built)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *itertools.product(("stages", "zero3"), KEYS),
        ("experts", "mixtral"),
        ("experts", "deepseek_v3"),
    ],
)
def test_given_weights_are_read_exactly(
    layout: str, name: str, result: Result, folder: Path
) -> None:
    ranks = [rank[f"{layout}-{name}"] for rank in result("given")]
    saved = load_file(folder / f"given-{layout}-{name}.safetensors")
    model = saved_model(name, KEYS[name])
    expected = dict(model.named_parameters())
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in expected.items())
    buffers = {key: value for rank in ranks for key, value in rank["buffers"].items()}
    biases = {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    assert buffers == {key: pytest.approx(b.tolist()) for key, b in biases.items()}
    assert bool(buffers) == (name == "deepseek_v3")


@pytest.mark.parametrize("name", KEYS)
def test_a_piece_of_the_model_is_read_at_a_time(name: str, result: Result) -> None:
    largest = max(
        sum(parameter.numel() for *_, parameter in piece.parameters())
        for piece in pieces(saved_model(name, KEYS[name]))
    )
    reads = [rank[f"stages-{name}"]["read"] for rank in result("given")]
    assert max(map(max, reads)) == largest
    assert all(len(read) in (2, 3, 4) for read in reads)  # of three layers and what is around them


def test_weights_that_one_stage_lacks_are_refused_by_all(result: Result) -> None:
    for rank in result("given"):
        assert "no weights for model.layers.1.mlp.up_proj.weight" in rank["refused"]


@pytest.mark.parametrize("name", ["divided", "undivided sends", "clipped by value", "odd divided"])
def test_evaluation_and_texts_are_the_undivided_models(name: str, result: Result) -> None:
    for rank in result("first_step"):
        expected, divided = rank["odd unsplit" if "odd" in name else "unsplit"], rank[name]
        assert divided["sums"] == pytest.approx(expected["sums"], rel=1e-6)
        for logits, theirs in zip(divided["logits"], expected["logits"], strict=True):
            assert logits == pytest.approx(theirs, abs=2e-6)


@pytest.mark.parametrize("name", ["divided", "undivided sends", "odd divided"])
def test_losses_and_norms_are_the_undivided_models(name: str, result: Result) -> None:
    for rank in result("first_step"):
        expected = rank["odd unsplit" if "odd" in name else "unsplit"]
        for (loss, norm), (true_loss, true_norm) in zip(
            rank[name]["steps"], expected["steps"], strict=True
        ):
            assert loss == pytest.approx(true_loss, rel=2e-6)
            assert norm == pytest.approx(true_norm, rel=2e-6)


def test_stages_send_parts_unless_these_would_be_uneven(result: Result) -> None:
    for rank in result("first_step"):
        assert rank["divided"]["partitioned"] is True
        assert rank["undivided sends"]["partitioned"] is False
        assert rank["odd divided"]["partitioned"] is False


def test_deepspeed_puts_no_uneven_parts_together(result: Result) -> None:
    """Once it does, plan/tensor.py need not let stages send whole states."""
    for rank in result("uneven_parts"):
        assert rank["6"] == "equal"
        assert rank["5"] != "equal", rank


def test_the_norm_that_clips_counts_everything_once(result: Result) -> None:
    """A tied weight is on both stages, norms on both ranks of one."""
    for rank in result("clipping"):
        for zero, step in rank.items():
            assert step["norm"] == pytest.approx(step["true"], rel=1e-6), zero
            assert step["own"] == pytest.approx(step["true"], rel=1e-6), zero
            assert step["moved"] == pytest.approx(0.05, rel=1e-4), zero


def test_all_ranks_skip_the_same_steps(result: Result) -> None:
    ranks = result("overflow")
    assert not ranks[0][0]["applied"]
    assert all(rank == ranks[0] for rank in ranks)


def test_ranks_of_a_stage_may_share_a_key_head(result: Result) -> None:
    for rank in result("shared_key_head"):
        assert rank["divided"] == pytest.approx(rank["unsplit"], rel=1e-6)
        assert rank["recomputed"] == pytest.approx(rank["divided"], rel=1e-6)


def test_a_micro_batch_sends_what_the_documents_say(result: Result) -> None:
    """docs/layouts.md: to the other stage a part of the hidden states; within a stage these four
    times a layer, and once more at either end; put together once there, and twice in coming back.
    """
    for rank in result("traffic"):
        states, losses = rank["states"], rank["losses"] if rank["stage"] else 0
        for kind, expected in (
            ("stages", states // 2),
            ("summed", (4 * rank["layers"] + 1) * states + losses),
            ("gathered", (1 if rank["stage"] else 2) * states),
        ):
            assert rank[kind] == rank["micro_batches"] * expected, (kind, rank)


def test_a_closed_engine_leaves_no_groups(result: Result) -> None:
    assert result("groups_left") == [0] * RANKS
