"""model.attention: what auto stands for on which device, and the sizes of approximate kinds."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from harness.estimate.activations import activation_evidence
from harness.layout.attention_table import ATTENTIONS
from harness.plan.attention import with_attention
from harness.plan.memory import memory_inputs
from harness.plan.text import summary
from tests.plan.plans import Planner

ZERO_1 = "ds.zero_optimization.stage=1"
H100 = f"GPU=h100-80 ds.bf16.enabled=true {ZERO_1}"
DOCUMENTS = "data.document_mask=true"
WINDOW = "model.overrides.model_type=mistral model.overrides.sliding_window"
NO_SDPA = ("eager", "transformers has no sdpa for mamba models")
SOFT_CAPS = "sdpa has no soft-capped attention scores, which gemma2 models have"


@pytest.mark.parametrize(
    ("line", "attention", "why"),
    [
        (H100, "sdpa", "the causal mask needs no tensor"),
        (f"{H100} {DOCUMENTS}", "varlen", "tokens attend within their document"),
        (f"{H100} {DOCUMENTS} train.micro_batch=4", "varlen", ""),
        (f"{H100} {WINDOW}=64", "varlen", "layers have a sliding window"),
        (f"{H100} {WINDOW}=129", "sdpa", ""),
        (f"{ZERO_1} ds.bf16.enabled=true {DOCUMENTS}", "sdpa", "a CPU has no faster kernel"),
        (f"GPU=v100-32 ds.fp16.enabled=true {ZERO_1} {DOCUMENTS}", "sdpa",
         "of varlen: its kernel needs an Ampere GPU or later"),
        (f"{H100} {DOCUMENTS} model.attention_dropout=0.1", "sdpa",
         "no dropout of attention weights (attention_dropout)"),
        (f"{H100} {DOCUMENTS} model.overrides.head_dim=320", "sdpa", "the model of 320"),
        (f"{H100} {DOCUMENTS} model.overrides.head_dim=12", "sdpa", "the model of 12"),
        (f"GPU=h100-80 {ZERO_1} {DOCUMENTS}", "sdpa", "the run in fp32"),
        (f"{H100} {DOCUMENTS} TORCH=2.10.0", "sdpa",
         "of varlen: torch 2.10.0's kernel has no windows and scales; torch 2.11's"),
        (f"{H100} {DOCUMENTS} TORCH=2.11.0", "varlen", ""),
        (f"{ZERO_1} {DOCUMENTS} model.attention=varlen", "varlen", ""),
        (f"{H100} model.name=gemma-2-9b", "eager",
         "torch's kernel has no soft-capped scores; flash_attn's has"),
        (f"{ZERO_1} model.name=gemma-2-9b", "eager", SOFT_CAPS),
        (f"{H100} model.name=$mamba data.seq_len=16", *NO_SDPA),
        (f"{ZERO_1} model.name=$mamba data.seq_len=16", *NO_SDPA),
        # The family does not tell where documents begin.
        (f"{H100} model.name=$opt data.seq_len=16 {DOCUMENTS}", "sdpa", ""),
        (f"{H100} model.attention=eager", "eager", ""),
    ],
)  # fmt: skip
def test_attention_is_chosen_for_the_device_of_the_plan(
    line: str, attention: str, why: str, planned: Planner
) -> None:
    made = planned(line, estimate=False)
    assert made.config.model.attention == attention
    assert why in made.attention_why
    assert not ("model.attention=" in line and made.attention_why)


def test_soft_capped_scores_take_varlen_beside_flash_attn(
    monkeypatch: pytest.MonkeyPatch, planned: Planner
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: ModuleSpec(name, None) if name == "flash_attn" else find(name, *more),
    )
    made = planned(f"{H100} model.name=gemma-2-9b", estimate=False)
    assert (made.config.model.attention, made.attention_why) == ("varlen", SOFT_CAPS)


def test_the_plan_shows_and_records_the_choice(planned: Planner) -> None:
    made = planned(f"{H100} {DOCUMENTS}")
    assert "attention      varlen (tokens attend within their document)" in summary(made)
    record = made.to_json()
    assert record["run"]["model"]["attention"] == "varlen"
    assert record["attention_why"] == "tokens attend within their document"
    assert "attention      eager\n" in summary(planned(f"{H100} model.attention=eager"))


def test_another_choice_is_another_estimate(planned: Planner) -> None:
    made = planned(f"{H100} {DOCUMENTS} model.name=llama-1b data.seq_len=2048")
    masked = with_attention(made, "sdpa", "it differs")
    inputs = memory_inputs(masked)
    assert inputs is not None
    assert inputs.attention == "sdpa"
    assert made.estimate is not None
    assert masked.estimate is not None
    assert masked.estimate.worst.peak > made.estimate.worst.peak


@pytest.mark.parametrize("kind", [name for name, row in ATTENTIONS.items() if not row.is_exact])
def test_a_kind_has_sizes_of_its_own_and_is_estimated(kind: str, planned: Planner) -> None:
    made = planned(f"{H100} model.attention={kind} data.seq_len=2048 {DOCUMENTS}")
    inputs = memory_inputs(made)
    assert inputs is not None
    sizes = made.config.model.attention_sizes
    assert dict(inputs.attention_sizes) == sizes
    assert {*sizes} == {*ATTENTIONS[kind].sizes}
    assert activation_evidence(inputs) == "traced"
    assert ATTENTIONS[kind].keys(sizes, 4096) < 2048


def test_a_size_may_be_set(planned: Planner) -> None:
    made = planned(f"{H100} model.attention=longformer model.attention_window=64", estimate=False)
    assert made.config.model.attention_sizes == {"window": 64, "global": 4}
