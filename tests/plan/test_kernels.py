"""How layers are computed: attention, kernels, compilation, recomputation and reversible layers in
a plan, and a compiled run.
"""

import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.estimate.activations import activation_evidence
from harness.launch.fork_server import Zygote
from harness.layout.attention_table import ATTENTIONS
from harness.layout.recompute import flops_again, matrix_elements
from harness.layout.shape import Shape, flops_per_unit
from harness.models.skeleton import hf_config
from harness.plan.make import with_facts
from harness.plan.memory import memory_inputs
from harness.plan.model_config import find_model_config
from harness.plan.plan import Facts
from harness.plan.text import summary
from harness.runfolder import RunFolder
from tests.plan.conftest import Packages
from tests.plan.plans import Planner
from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL, events

ZERO_1 = "ds.zero_optimization.stage=1"
ON_H100 = f"GPU=h100-80 ds.bf16.enabled=true {ZERO_1}"
DOCUMENTS = "data.document_mask=true"
WINDOW = "model.overrides.model_type=mistral model.overrides.sliding_window"
SOFT_CAPS = "sdpa has no soft-capped attention scores, which gemma2 models have"


def test_soft_caps_take_varlen_beside_flash_attn(packages: Packages, planned: Planner) -> None:
    packages("flash_attn")
    made = planned(f"{ON_H100} model.name=gemma-2-9b", estimate=False)
    assert (made.config.model.attention, made.attention_why) == ("varlen", SOFT_CAPS)


def test_the_plan_records_the_choice(planned: Planner) -> None:
    record = planned(f"{ON_H100} {DOCUMENTS}", estimate=False).to_json()
    assert record["run"]["model"]["attention"] == "varlen"
    assert record["attention_why"] == "tokens attend within their document"


def test_documents_that_only_the_data_shows_count(planned: Planner) -> None:
    made = planned(f"{ON_H100} model.name=llama-1b data.seq_len=2048")
    assert made.config.model.attention == "sdpa"
    varlen = with_facts(made, Facts(has_documents=True))
    assert varlen.config.model.attention == "varlen"
    assert varlen.attention_why == "tokens attend within their document"
    masked = planned(f"{ON_H100} {DOCUMENTS} model.name=llama-1b data.seq_len=2048")
    fallen_back = with_facts(masked, replace(varlen.facts, attention=("sdpa", "it differs")))
    assert memory_inputs(fallen_back).attention == "sdpa"
    assert fallen_back.estimate.worst.peak > masked.estimate.worst.peak


@pytest.mark.parametrize("kind", [name for name, row in ATTENTIONS.items() if not row.is_exact])
def test_a_kind_has_sizes_of_its_own_and_is_estimated(kind: str, planned: Planner) -> None:
    made = planned(f"{ON_H100} model.attention={kind} data.seq_len=2048 {PLAIN} {DOCUMENTS}")
    inputs = memory_inputs(made)
    sizes = made.config.model.attention_sizes
    assert dict(inputs.attention_sizes) == sizes
    assert {*sizes} == {*ATTENTIONS[kind].sizes}
    assert activation_evidence(inputs) == "traced"
    assert ATTENTIONS[kind].keys(sizes, 4096) < 2048


H100 = "GPU=h100-80 ds.zero_optimization.stage=3"
PLAIN = "model.kernels=none model.compile=false train.micro_batch=2"
REVERSIBLE = f"{H100} model.reversible=true {PLAIN}"
LIGER = "GPU=h100-80 model.kernels=liger"


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, planned: Planner) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (problem,) = planned.problems("model.compile=true")
    assert problem.startswith("model.compile is True: it needs a C++ compiler")


def test_the_estimate_of_compiled_layers_is_a_guess(planned: Planner) -> None:
    plain, fused = planned(f"GPU=h100-80 {PLAIN}"), planned(f"{LIGER} model.compile=true")
    assert "compiled" not in summary(plain)
    for plan, evidence in ((plain, "traced"), (fused, "guessed")):
        assert plan.estimate.worst.evidence("activations: mlp") == evidence


def test_layer_inputs_may_be_kept_in_host_memory(planned: Planner) -> None:
    words = "model.checkpointing=2 model.activation_offload=true model.mlp_tiles=4"
    estimate = planned(f"{H100} {words}").estimate
    assert "activations: layer inputs" in estimate.worst.phase("loss", "host")


def test_recomputed_operations_are_counted() -> None:
    shape = Shape.from_hf(find_model_config("llama-3-8b")[0])
    layer = flops_per_unit(shape, 4096)[1]
    mlp = 2 * 3 * 4096 * 14336
    assert 2 * matrix_elements(shape.body.layers[0]) == mlp
    again = {way: flops_again(shape, 4096, way)[1:4] for way in ("none", "selective", "full", 2)}
    once = layer // 3
    kept = {"none": [0, 0, 0], "selective": [0, 0, 0]}
    assert again == {**kept, "full": [once] * 3, 2: [once, 0, once]}
    tiled = {way: flops_again(shape, 4096, way, mlp_tiles=4)[1] for way in again}
    most = mlp - mlp // 4  # all tiles but the last
    assert tiled["none"] == mlp
    assert tiled["selective"] == mlp + most
    assert tiled["full"] == layer // 3 - mlp + most + mlp


def test_a_reversible_plan_says_so_everywhere(planned: Planner) -> None:
    made = planned(f"{REVERSIBLE} model.name=llama-3-8b", estimate=False)
    assert made.model_config["reversible"] is True
    assert hf_config(made.model_config).reversible is True
    residual = "model.name=$parallel_residual model.overrides.use_parallel_residual=false"
    assert planned(f"{REVERSIBLE} {residual} data.seq_len=16").checkpointing == "reversible"


def test_the_estimate_of_reversible_layers_is_flat_in_depth(planned: Planner) -> None:
    kept = set()
    for layers in (2, 32):
        depth = f"model.overrides.num_hidden_layers={layers}"
        made = planned(f"{REVERSIBLE} model.name=llama-3-8b {depth}")
        parts = made.estimate.worst.phase("loss")
        kept.add(tuple(size for name, size in parts.items() if name.startswith("activations")))
    assert len(kept) == 1
    inputs = memory_inputs(made)
    stream = 4 * inputs.shape.hidden_size * inputs.tokens
    assert parts["activations: streams"] == 2 * stream


def test_weights_of_another_function_are_refused(planned: Planner) -> None:
    """Weights of a reversible model give a reversible one, since their config implies it."""
    config = planned(REVERSIBLE).model_config
    plain = planned.add("plain", {**config, "reversible": False}).parent
    streams = planned.add("streams", config).parent
    (problem,) = planned.problems(f"{REVERSIBLE} model.init_from={plain}")
    assert "was trained with another setting" in problem
    assert planned(f"{H100} model.init_from={streams}").checkpointing == "reversible"


@pytest.mark.gate("plan")
def test_compiled_run_resumes_the_curve(zygote: Zygote, data: list[str], tmp_path: Path) -> None:
    words = [
        f"--deepspeed={REPOSITORY / 'ds_configs' / 'zero3_offload.json'}",
        *(*SMALL_MODEL, *SHORT_RUN, *data, "model.checkpointing=full", "sample.tokens=6"),
        *("model.overrides.num_hidden_layers=3", "optim.schedule=constant"),
    ]

    def train(name: str, *more: str) -> RunFolder:
        arguments = [*words, *more, f"run.dir={tmp_path / name}"]
        ended = zygote.run(arguments, tmp_path / "logs", ranks=1, limit_s=400)
        assert ended.codes == [0], ended.output
        assert "recompile_limit" not in ended.output
        return RunFolder(tmp_path / name)

    plain = train("plain", "train.steps=6")
    train("compiled", "train.steps=3")
    compiled = train("compiled", "train.steps=6", "model.compile=true", "profile.steps=4:6")
    (resumed,) = events(compiled, "resumed")
    assert "model.compile" in {change["key"] for change in resumed["changes"]}
    curves = [[line.get("loss") for line in run.read_metrics()] for run in (plain, compiled)]
    assert curves[1][1:4] == curves[0][1:4]
    assert curves[1][4:] == pytest.approx(curves[0][4:], abs=2e-6)
    with gzip.open(compiled.profile_dir / "trace-4-5.json.gz", "rt") as trace:
        assert "CompiledFunctionBackward" in trace.read()
    assert "aten.mm" in (compiled.profile_dir / "flops-6.txt").read_text()
