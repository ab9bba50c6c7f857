"""Architectures unknown to the planner, counted by tracing their own classes."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from harness.estimate.activations import saved_for_backward
from harness.estimate.inputs import BY_REFERENCE, WITH_KERNELS
from harness.layout.shape import Shape, num_parameters
from harness.layout.world import STATE_KERNELS, World
from harness.models import state_kernels, tracing
from harness.models.loss import PLAIN
from harness.models.skeleton import hf_config, skeleton
from harness.models.tracing import Request, shape_of, trace
from harness.plan import memory
from harness.plan.command import parse_command, plan_from
from harness.plan.memory import traced_inputs
from harness.run.dry_run import dry_run
from tests.real_runs import imported
from tests.run_tools import run_tool
from tests.tables import beside
from tests.tiers import rest_in_gate
from tools.estimate_memory import traced_saved

SIZES = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
SIZES |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 5}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
UNKNOWN = ("stablelm", "granite", "starcoder2", "cohere", "olmo", "glm")
MIXED = beside(__file__, "unknown.toml")["mixed"]
ASKED = {"source": None, "precision": "bf16", "attention": "sdpa", "micro_batch": 1}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keep traces in a temporary folder; trace in forks of a process that has imported all."""
    imported()  # the process that is forked for all later tests, too, keeps its environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(memory, "_asked", lambda t: json.loads(run_tool("tracing", said=t).stdout))
        yield patch


@pytest.fixture
def plan_of(tmp_path: Path) -> Any:
    def make(config: dict[str, Any], *words: str) -> Any:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        settings = [f"model.name={path}", "data.seq_len=128", "train.micro_batch=2", *words]
        return plan_from(parse_command(settings), {}, World(world_size=4, accelerator="cuda"))

    return make


@pytest.mark.parametrize("model_type", rest_in_gate("memory", UNKNOWN, 0))
def test_trace_counts_every_parameter_and_saved_tensor(model_type: str, plan_of: Any) -> None:
    plan = plan_of({"model_type": model_type, **SIZES}, "train.global_batch=8")
    assert plan.shape is None
    estimate = plan.estimate
    model = skeleton(hf_config(plan.model_config), torch.float32)
    assert num_parameters(estimate.inputs.shape) == sum(p.numel() for p in model.parameters())
    assert len(estimate.inputs.shape.body.layers) == 5
    saved = traced_saved(plan.model_config, estimate.inputs)
    assert saved_for_backward(estimate.inputs) == pytest.approx(saved, rel=0.03)
    parts = [part for part in estimate.worst.parts if part.component.endswith("layers")]
    assert {part.evidence for part in parts} == {"traced"}
    assert f"{num_parameters(estimate.inputs.shape):,} (" in dry_run(plan).text()


@pytest.mark.parametrize("model_type", rest_in_gate("memory", MIXED))
def test_each_kind_of_layer_is_traced_once(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **MIXED[model_type]).to_dict()
    request = Request(config, None, "bf16", "sdpa", 1, 128)
    made = trace(request)
    with tracing._built(request) as model:
        whole = tracing._saved(model, request, PLAIN, range(len(made.layers)))
    assert made.bytes == pytest.approx(whole, rel=0.001)
    assert len({*made.layers}) > 1
    has_states = model_type in ("qwen3_next", "jamba")
    assert made.way == (BY_REFERENCE if has_states else "traced")


def test_kernels_of_packages_not_named_are_hidden() -> None:
    kernels = ("causal_conv1d_fn", "mamba_inner_fn", "chunk_gated_delta_rule")
    with mock.patch.dict(sys.modules, dict.fromkeys(STATE_KERNELS, state_kernels)):  # "installed"
        state_kernels.stand_in(["fla"])
        found = [hasattr(sys.modules[p], k) for p, k in zip(STATE_KERNELS, kernels, strict=True)]
    assert found == [False, False, True]


KERNEL_FAMILIES = ["lfm2", "qwen3_next", "mamba", "mamba2"]


@pytest.mark.gate("memory")
@pytest.mark.parametrize("model_type", rest_in_gate("memory", KERNEL_FAMILIES))
def test_kernels_keep_less_than_reference_code(model_type: str) -> None:
    """As in their packages' sources; the rest of the layers keeps the same."""
    kinds = {"layer_types": ["conv", "full_attention"] * 2} if model_type == "lfm2" else {}
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, **kinds).to_dict()
    request = {"config": config, **ASKED, "seq_len": 128}
    reference, fused = (memory.traced({**request, "kernels": k}) for k in ((), STATE_KERNELS))
    assert (reference.way, fused.way) == (BY_REFERENCE, WITH_KERNELS)
    assert fused.shape == reference.shape
    assert fused.outside == reference.outside
    assert sum(fused.layers) < sum(reference.layers)


@pytest.mark.gate("memory")
def test_a_fused_layer_of_mamba_keeps_what_its_source_says() -> None:
    """MambaInnerFn saves input, projection, states and output; the layer adds its surroundings."""
    sizes = {"hidden_size": 64, "state_size": 16, "conv_kernel": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model("mamba", **sizes).to_dict()
    rank, tokens, channels = config["time_step_rank"], 3000, 128
    request = {"config": config, **ASKED, "seq_len": tokens, "kernels": STATE_KERNELS}
    kept = 2 * tokens * (2 * channels + rank + 2 * 16 + 2 * 16 + channels)  # xz, x_dbl, B, C, out
    kept += 4 * channels * 2 * 2 * 16  # states of two chunks, each twice, in fp32
    kept += 4 * channels * (2 * 16 + 2)  # A and its negative, D, delta_bias
    norm = 4 * tokens + tokens * 64 * (4 + 2 + 2)  # its root, in fp32, twice in bf16
    layer, _ = memory.traced(request).layers
    assert layer == kept + norm


@pytest.mark.gate("memory")
def test_traced_attention_is_that_of_the_run() -> None:
    config = {"model_type": "stablelm", **SIZES}
    sdpa, eager = (trace(Request(config, None, "bf16", a, 2, 128)) for a in ("sdpa", "eager"))
    assert eager.bytes > sdpa.bytes
    dropped = trace(Request({**config, "attention_dropout": 0.1}, None, "bf16", "sdpa", 2, 128))
    assert dropped == sdpa


@pytest.mark.gate("memory")
@pytest.mark.parametrize("way", ["none", "selective", "full"])
def test_a_known_family_comes_to_the_same_either_way(way: str, plan_of: Any) -> None:
    config = {"model_type": "llama", **SIZES}
    words = "train.global_batch=8", "model.kernels=none", f"model.checkpointing={way}"
    plan = plan_of(config, *words)
    inputs = traced_inputs(plan)
    ours, theirs = Shape.from_hf(plan.model_config), inputs.shape
    sets = [{(t.name, t.shape) for t in shape.tensors()} for shape in (ours, theirs)]
    assert sets[0] == sets[1]
    counted = saved_for_backward(plan.estimate.inputs)
    assert saved_for_backward(inputs) == pytest.approx(counted, rel=0.005)


@pytest.mark.gate("memory")
def test_trace_is_cached(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "glm", **SIZES, "num_hidden_layers": 3}
    first = plan_of(config, "train.global_batch=8").estimate.to_json()
    monkeypatch.setattr(memory, "_asked", lambda text: pytest.fail("traced again"))
    assert plan_of(config, "train.global_batch=8").estimate.to_json() == first


def test_a_trace_is_read_where_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    request, answer = {"a": 1}, {"b": 2}
    path = memory._kept(json.dumps(request))
    path.with_suffix(".lock").mkdir()  # root, too, cannot open it
    asked = []
    monkeypatch.setattr(memory, "_asked", lambda text: asked.append(text) or answer)
    path.mkdir()
    assert memory._answered(request) == memory._answered(request) == answer
    assert len(asked) == 2
    path.rmdir()
    path.write_text(json.dumps(answer))
    assert memory._answered(request) == answer
    assert len(asked) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/.cache")
    assert memory._kept("") is None


def test_nonfinite_config_values_are_read_as_in_transformers(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba2", num_hidden_layers=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["time_step_limit"][1] == {"__float__": "Infinity"}
    assert hf_config(config).time_step_limit[1] == float("inf")


@pytest.mark.gate("memory")
def test_a_class_that_cannot_be_built_is_one_report(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "t5", "vocab_size": 100}))
    refused = run_tool("estimate_memory", "--model", path, code=2)
    assert "Traceback" not in refused.stderr
    assert "its class cannot be traced" in refused.stderr


def test_a_padding_token_outside_of_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match=r"pad_token_id is 512, .* set model\.overrides\.pad_tok"):
        hf_config({"model_type": "glm", **SIZES, "pad_token_id": 512})


@pytest.mark.parametrize(
    ("model_type", "changes", "kinds"), beside(__file__, "unknown.toml")["layers"]
)
def test_attention_kinds(model_type: str, changes: dict[str, Any], kinds: list[list[str]]) -> None:
    config = {"model_type": model_type, **SIZES, "num_hidden_layers": len(kinds), **changes}
    layers = shape_of(Request(config, None, "bf16", "sdpa", 1, 16))["body"]["layers"]
    mixers = [{kind for _, _, kind in layer} & {"attention", "states"} for layer in layers]
    assert mixers == [{*kind} for kind in kinds]


def test_traced_model_windows_are_those_of_its_config() -> None:
    text = {**SIZES, "num_hidden_layers": 6, "sliding_window": 64}
    config = {"model_type": "gemma3", "text_config": text}  # it reads images, too
    sizes = shape_of(Request(config, None, "bf16", "sdpa", 1, 16))["sizes"]
    assert sizes["sliding_windows"] == [64, 64, 64, 64, 64, None]
