"""Differences of memory that others published, beside the estimate (docs/memory.md)."""

from __future__ import annotations

from functools import partial

import pytest

from harness.estimate.held import GIB
from harness.estimate.inputs import Inputs
from harness.estimate.timeline import estimate_memory
from harness.estimate.zero_settings import ZeroSettings
from harness.layout.grid import Grid
from harness.layout.shape import Shape
from harness.plan.model_config import find_model_config
from tests.estimate.defaults import default_value

MIB = 2**20
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 50_000,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Layers of 12 h^2 weights between two matrices of the vocabulary: 6.86B parameters."""


def inputs(shape: Shape, ranks: int, **keys: object) -> Inputs:
    """Return a run whose JSON has these keys alone."""
    return Inputs(
        shape=shape,
        zero=ZeroSettings.read(partial(default_value, **{"type": "AdamW", **keys})),
        precision="bf16",
        grid=Grid(ranks),
        micro_batch=1,
        seq_len=512,
        grad_accum=1,
        checkpointing="full",
    )


def component(name: str, **keys: object) -> float:
    """Return the MiB of a component in the backward pass of ZeRO 2 on eight ranks."""
    shape = Shape.from_hf(find_model_config("llama-1b")[0])
    worst = estimate_memory(inputs(shape, 8, stage=2, **keys)).worst
    return worst.phase("backward_first")[name] / MIB


def test_zero_2_without_overlap_saves_a_bucket() -> None:
    """DeepSpeed#1302, indices 0 and 2: 21,152 and 20,198 MiB."""
    name = "gradient buckets"
    saved = component(name, overlap_comm=True) - component(name, overlap_comm=False)
    assert saved == pytest.approx(954, rel=0.001)


def test_zero_2_with_a_bucket_of_1e8_saves_two_times_what_it_is_smaller() -> None:
    """DeepSpeed#1302, indices 0 and 3: 21,152 and 19,625 MiB. The copy that is reduced shrinks,
    too, which DeepSpeed of then did not make.
    """
    large, small = ({"overlap_comm": True, "reduce_bucket_size": n} for n in (500e6, 100e6))

    def saved(name: str) -> float:
        return component(name, **large) - component(name, **small)

    assert saved("gradient buckets") == pytest.approx(1527, rel=0.001)
    assert saved("communication copy") == pytest.approx(762.9, rel=0.001)


@pytest.mark.parametrize(
    ("half", "resident", "peak"), [(False, 25.74, 31.38), (True, 16.17, 18.93)]
)
def test_zero_3_on_four_gpus_with_fp32_and_with_16_bit_master_weights(
    half: bool, resident: float, peak: float
) -> None:
    """DeepSpeedExamples, training/bf16_master_weight: 6.86B parameters, one sample of 512 tokens,
    checkpointing.
    """
    shape = Shape.from_hf(NEOX)
    assert shape.parameters == pytest.approx(6.86e9, rel=0.001)
    keys = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if half else {}
    worst = estimate_memory(inputs(shape, 4, stage=3, **keys)).worst
    parts = worst.phase("between_steps")
    states = ("parameters", "persistent parameters", "master", "moments", "gradients")
    assert sum(parts[name] for name in states) / GIB == pytest.approx(resident, rel=0.015)
    assert worst.total("between_steps") / GIB == pytest.approx(resident, rel=0.05)
    assert worst.peak / GIB == pytest.approx(peak, rel=0.1)
