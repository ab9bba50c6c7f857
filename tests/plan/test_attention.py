"""model.attention: what auto stands for on which device, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.estimate.activations import activation_evidence
from harness.layout.attention_table import ATTENTIONS
from harness.layout.world import World
from harness.plan.attention import with_attention
from harness.plan.make import make_plan
from harness.plan.memory import memory_inputs
from harness.plan.plan import Plan
from harness.plan.text import summary
from tools.proofs.hybrids import HYBRIDS
from tools.proofs.models import LEARNED

CPU = World()
H100 = World(accelerator="cuda", gpu="h100-80")
V100 = World(accelerator="cuda", gpu="v100-32")
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
DOCUMENTS = "data.document_mask=true"


def planned(*words: str, world: World = H100, ds: dict[str, object] = BF16) -> Plan:
    return make_plan(load_run_config(None, words), ds, world)


def chosen(*words: str, world: World = H100, ds: dict[str, object] = BF16) -> tuple[str, str]:
    made = planned(*words, world=world, ds=ds)
    return made.config.model.attention, made.attention_why


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the package."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "flash_attn" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_documents_and_windows_take_varlen_on_a_gpu() -> None:
    assert chosen() == ("sdpa", "the causal mask needs no tensor")
    assert chosen(DOCUMENTS) == ("varlen", "tokens attend within their document")
    assert chosen(DOCUMENTS, "train.micro_batch=4")[0] == "varlen"
    window = ("model.name=tiny", "model.overrides.model_type=mistral")
    assert chosen(*window, "model.overrides.sliding_window=64") == (
        "varlen",
        "layers have a sliding window",
    )
    assert chosen(*window, "model.overrides.sliding_window=129")[0] == "sdpa"


def test_the_device_is_the_plans_and_not_this_machines() -> None:
    assert chosen(DOCUMENTS, world=CPU) == ("sdpa", "a CPU has no faster kernel")
    assert chosen(DOCUMENTS, world=H100)[0] == "varlen"
    fp16 = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
    name, why = chosen(DOCUMENTS, world=V100, ds=fp16)
    assert name == "sdpa"
    assert "of varlen: its kernel needs an Ampere GPU or later" in why


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("model.attention_dropout=0.1",), "no dropout of attention weights (attention_dropout)"),
        (("model.overrides.head_dim=320",), "the model of 320"),
        (("model.overrides.head_dim=12",), "the model of 12"),
    ],
)
def test_a_model_that_the_kernel_cannot_compute_takes_a_mask(
    words: tuple[str, ...], why: str
) -> None:
    attention, reason = chosen(DOCUMENTS, *words)
    assert attention == "sdpa"
    assert why in reason
    with pytest.raises(ConfigError, match=r'use "auto" or "sdpa"') as caught:
        planned(DOCUMENTS, *words, "model.attention=varlen")
    assert why in str(caught.value)


def test_fp32_is_no_precision_of_the_kernel() -> None:
    fp32 = {"zero_optimization": {"stage": 1}}
    assert "the run in fp32" in chosen(DOCUMENTS, ds=fp32)[1]
    assert chosen(DOCUMENTS, "model.attention=varlen", world=CPU, ds=fp32) == ("varlen", "")


def test_soft_capped_scores_need_flash_attn(flash_attn: None) -> None:
    assert chosen("model.name=gemma-2-9b") == (
        "varlen",
        "sdpa has no soft-capped attention scores, which gemma2 models have",
    )


def test_soft_capped_scores_are_eager_without_flash_attn() -> None:
    attention, why = chosen("model.name=gemma-2-9b")
    assert attention == "eager"
    assert "torch's kernel has no soft-capped scores; flash_attn's has" in why


@pytest.mark.parametrize("world", [CPU, H100])
def test_decoders_without_torchs_attention_are_eager(world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS["mamba"]))
    words = (f"model.name={tmp_path}", "data.seq_len=16")
    expected = ("eager", "transformers has no sdpa for mamba models")
    assert chosen(*words, world=world) == expected
    with pytest.raises(ConfigError, match=expected[1]):
        planned(*words, "model.attention=sdpa", world=world)


def test_families_that_tell_no_bounds_are_not_given_varlen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LEARNED["opt"]))
    words = (f"model.name={tmp_path}", "data.seq_len=16", DOCUMENTS)
    assert chosen(*words)[0] == "sdpa"
    with pytest.raises(ConfigError, match="opt models do not tell it where documents begin"):
        planned(*words, "model.attention=varlen")


def test_the_plan_shows_and_records_the_choice() -> None:
    made = planned(DOCUMENTS)
    assert "attention      varlen (tokens attend within their document)" in summary(made)
    record = made.to_json()
    assert record["run"]["model"]["attention"] == "varlen"
    assert record["attention_why"] == "tokens attend within their document"
    own = planned("model.attention=eager")
    assert "attention      eager\n" in summary(own)
    assert own.attention_why == ""


def test_another_choice_is_another_estimate() -> None:
    made = planned(DOCUMENTS, "model.name=llama-1b", "data.seq_len=2048")
    masked = with_attention(made, "sdpa", "it differs")
    inputs = memory_inputs(masked)
    assert inputs is not None
    assert inputs.attention == "sdpa"
    assert made.estimate is not None
    assert masked.estimate is not None
    assert masked.estimate.worst.peak > made.estimate.worst.peak


KINDS = [name for name, row in ATTENTIONS.items() if not row.is_exact]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_sizes_of_its_own_and_is_estimated(kind: str) -> None:
    made = planned(f"model.attention={kind}", "data.seq_len=2048", DOCUMENTS)
    inputs = memory_inputs(made)
    assert inputs is not None
    assert dict(inputs.attention_sizes) == made.config.model.attention_sizes
    assert {*made.config.model.attention_sizes} == {*ATTENTIONS[kind].sizes}
    assert activation_evidence(inputs) == "traced"
    assert ATTENTIONS[kind].keys(dict(inputs.attention_sizes), 4096) < 2048


def test_a_size_is_set_only_where_it_is_one() -> None:
    words = ("model.attention=longformer", "model.attention_window=64")
    assert planned(*words).config.model.attention_sizes == {"window": 64, "global": 4}
    for words, problem in {
        ("model.attention_window=64",): "model.attention=auto has no such size",
        ("model.attention=longformer", "model.attention_buckets=8"): "it is one of reformer",
        ("model.attention=longformer", "model.attention_global=999"): "samples have 128 tokens",
        ("model.attention=linformer", "model.attention_features=9"): "is not a multiple of",
        ("model.attention=performer", "model.attention_features=0"): "attention_features is 0",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            planned(*words)


def test_a_kind_is_rejected_where_it_would_be_another_attention(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LEARNED["opt"]))
    window = ("model.overrides.model_type=mistral", "model.overrides.sliding_window=64")
    for words, problem in {
        ("model.attention_dropout=0.1",): "no dropout of attention weights",
        ("model.name=gemma-2-9b",): "it has no soft-capped attention scores, which gemma2",
        window: "layers of mistral models have sliding windows of their own",
        (f"model.name={tmp_path}", "data.seq_len=16"): "opt models do not tell it where",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            planned(*words, "model.attention=longformer")
