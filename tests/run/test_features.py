"""Every feature trains, resumes as if uninterrupted, changes its layout, and is exported."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    dynamic_module_utils,
)

from harness.checkpoint.compatibility import recorded_run
from harness.checkpoint.store import checkpoint_of
from harness.data.build import build_data
from harness.data.pair import IndexedTokens
from harness.data.spec import DataSpec
from harness.errors import ExitCode
from harness.models.as_trained import attend_as_trained
from harness.models.loss import forward
from harness.run.saving import stored_probe, texts_of
from harness.runfolder import RunFolder
from tests.data.chat_tokenizers import chats, tokenizer_of
from tests.real_runs import events
from tests.run.features import FEATURES, LAYOUTS, Feature, Runs, in_gate
from tests.run_tools import run_tool
from tools import chat, export_hf

Lines = dict[int, dict[str, float]]
IDS = torch.arange(24).view(2, 12)
EQUAL = ("samples", "tokens", "global_batch", "sequence_length", "learning_rate")


def lines_of(run: RunFolder) -> Lines:
    """Return the values that a run learned and their inputs, by step."""
    lines: Lines = {}
    for line in run.read_metrics():
        values = {
            name: value
            for name, value in line.items()
            if name in (*EQUAL, "loss", "grad_norm")
            or name.startswith(("loss/", "eval_loss", "old_eval_loss"))
        }
        positions = enumerate(line.get("loss_by_position", ()))
        values |= {f"position {place}": loss for place, loss in positions if loss is not None}
        lines[line["step"]] = values
    return lines


def assert_alike(feature: Feature, run: RunFolder, whole: RunFolder, after: int = -1) -> None:
    """Compare two runs of a feature after a step, within its rounding."""
    ours, theirs = lines_of(run), lines_of(whole)
    compared = [step for step in theirs if step > after and step in ours]
    assert len(compared) > 1
    for step in compared:
        assert not {"loss", "grad_norm"} & (ours[step].keys() ^ theirs[step].keys())
        for name in ours[step].keys() & theirs[step].keys():
            rounding = feature.norm_rounding if name == "grad_norm" else feature.loss_rounding
            tolerance = 0 if name in EQUAL else rounding
            expected = pytest.approx(theirs[step][name], rel=tolerance, abs=0)
            assert ours[step][name] == expected, (step, name)


def reservoir(run: RunFolder) -> dict[str, bytes]:
    """Return the files of a run's reservoir; empty if it keeps none."""
    return {path.name: path.read_bytes() for path in run.path.glob("reservoir/*")}


def cells(verb: str) -> list[Any]:
    """Return the features to which a verb applies, each with its layout; most are in the gate."""
    return [
        pytest.param(
            *(name, layout), marks=() if is_now else pytest.mark.gate("runs"), id=f"{name}-{layout}"
        )
        for name, feature in FEATURES.items()
        for layout, is_now in feature.cells(verb)
    ]


# --- every feature, every verb ---


@pytest.mark.slow("whole runs on two ranks")
@pytest.mark.parametrize(("name", "layout"), cells("trains"))
def test_a_feature_trains_on_the_ranks_of_its_plan(name: str, layout: str, runs: Runs) -> None:
    assert_trained(runs.whole(name), name, layout)


def assert_trained(run: RunFolder, name: str, layout: str) -> None:
    title = layout if layout in LAYOUTS else layout.split(" ")[0]
    feature, ds, lines = FEATURES[name], LAYOUTS[title], lines_of(run)
    assert (run.read_status() or {})["outcome"] == "done"
    assert (min(lines), max(lines)) == (0, 3 if title == "3d" else feature.steps)
    assert all("eval_loss" in lines[step] for step in (0, max(lines)))
    (engine,) = events(run, "engine")
    assert engine["step"] == 1
    assert all(rank.keys() >= {"engine", "optimizer", "elements_held"} for rank in engine["ranks"])
    assert {rank["zero_stage"] for rank in engine["ranks"]} == {ds.zero_stage}
    stages = [rank.get("pipeline_stage") or 0 for rank in engine["ranks"]]
    assert stages == sorted([*range(ds.stages)] * (ds.ranks // ds.stages))
    offloads = {rank["inner_optimizer"] == "DeepSpeedCPUAdam" for rank in engine["ranks"]}
    assert offloads == {"offload" in ds.json}
    verified = events(run, "verified")
    assert len(verified) == ds.is_verified
    for event in verified:
        if feature.is_random:
            assert event["grad_norm"] == "not compared: steps are random"
        elif name != "smoothing" and 1 in lines:  # the first batch is compared without smoothing
            rounding = 1e-5 if "offload" in layout or name == "experts" else 1e-6
            assert event["loss"] == pytest.approx(lines[1]["loss"], rel=rounding)
            assert event["grad_norm"] == pytest.approx(lines[1]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("name", "layout"), cells("alike"))
def test_a_layout_learns_the_same(name: str, layout: str, runs: Runs) -> None:
    run = runs.whole(name, layout)
    assert_trained(run, name, layout)
    assert_alike(FEATURES[name], run, runs.whole(name))


@pytest.mark.parametrize(("name", "layout"), cells("resumes"))
def test_resumed_runs_are_equal_bit_for_bit(name: str, layout: str, runs: Runs, tmp_path) -> None:
    feature, whole = FEATURES[name], runs.whole(name)
    again = runs.resumed(name, layout, tmp_path / "run", *feature.resumed_with.split())
    assert len(events(again, "resumed")) == 1
    assert events(again, "verified") == events(whole, "verified")  # but not a second time
    ours, theirs = lines_of(again), lines_of(whole)
    logged = [step for step in theirs if step > feature.stop]
    assert logged == [step for step in ours if step > feature.stop]
    for step in logged:
        if feature.resumed_with:  # they set what is evaluated, and when
            theirs[step] = {key: theirs[step][key] for key in ours[step]}
        assert ours[step] == theirs[step], step
    assert "eval_loss" in ours[feature.steps]
    assert reservoir(again) == reservoir(whole)


@pytest.mark.parametrize(("name", "layout"), cells("others"))
def test_a_run_goes_on_in_another_layout(name: str, layout: str, runs: Runs, tmp_path) -> None:
    feature, whole = FEATURES[name], runs.whole(name)
    run = runs.resumed(name, layout, tmp_path / "run")
    (resumed,) = events(run, "resumed")
    assert resumed["step"] == feature.stop
    assert "deepspeed" in {change["key"] for change in resumed["changes"]}
    assert_alike(feature, run, whole, feature.stop)
    assert reservoir(run) == reservoir(whole)


@pytest.mark.parametrize(("name", "layout"), cells("exports"))
def test_the_export_computes_what_was_trained_and_answers(
    name: str, layout: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It equals the held-out loss in the checkpoint, computed in transformers or peft."""
    run, export = runs.whole(name, layout), tmp_path / "export"
    assert run.export_dir.exists() == ("save.export=true" in " ".join(runs.words(name)))
    assert export_hf.main([str(run.path), "--out", str(export)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"its probe loss is \S+, and was \S+ in training \(equal within", out)
    checkpoint = checkpoint_of(str(run.path))
    probe, loss = stored_probe(checkpoint), 0.0
    config = export / "config.json"
    assert ("serve it" in out) != (config.is_file() and "auto_map" in config.read_text())
    model = opened(export, runs)
    for text in texts_of(probe):
        with torch.no_grad():
            loss += float(forward(model, text.input_ids, text.labels, text.position_ids)[0])
    loss /= int((probe.labels != -100).sum())
    rounding = 1e-6 if name == "nf4" else 1e-5
    assert loss == pytest.approx(checkpoint.manifest.probe_loss, rel=rounding)
    assert chat.main([str(export), "--prompt", "the model reads", "--tokens", "4"]) == 0


def opened(export: Path, runs: Runs) -> Any:
    """Return an export opened as the docs say."""
    attention = export / "trained_attention.json"
    if not (export / "adapter_config.json").exists():
        brings_code = (export / "modeling_as_trained.py").exists()
        how = {"dtype": torch.float32, "trust_remote_code": brings_code}
        with mock.patch.object(dynamic_module_utils, "HF_MODULES_CACHE", str(runs.folder / "code")):
            return AutoModelForCausalLM.from_pretrained(export, **how).eval()
    model = PeftModel.from_pretrained(base_of(export, runs), str(export)).eval()
    if attention.exists():
        attend_as_trained(model.get_base_model(), json.loads(attention.read_text()))
    return model


def base_of(export: Path, runs: Runs) -> Any:
    """Return the base model of adapters, in 4 bits if it was."""
    description, more = export / "quantization_config.json", {}
    if description.exists():
        bits = BitsAndBytesConfig.from_dict(json.loads(description.read_text()))
        more = {"quantization_config": bits}
    base = runs.whole("plain").export_dir
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **more)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # this model's rows are not packed
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


# --- adapters ---


@pytest.mark.parametrize("name", ["lora", in_gate("nf4")])
def test_adapters_save_alone_and_merge_exactly(name: str, runs: Runs, tmp_path, capsys) -> None:
    run, alone, merged = runs.whole(name), tmp_path / "alone", tmp_path / "merged"
    index = json.loads((run.checkpoints_dir / "step-00000004" / "index.json").read_text())
    assert index
    assert all("lora_" in name for name in index)
    assert export_hf.main([str(run.path), "--out", str(alone)]) == 0
    assert [path.name for path in alone.glob("*.safetensors")] == ["adapter_model.safetensors"]
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    base = str(runs.whole("plain").export_dir)
    assert config["base_model_name_or_path"] == base
    serving = f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules tuned={alone}"
    shown = f"merge it first: python tools/export_hf.py {run.path} --merge"
    assert (shown if name == "nf4" else serving) in capsys.readouterr().out
    adapted = logits(opened(alone, runs))
    plain = AutoModelForCausalLM.from_pretrained(
        runs.whole("plain").export_dir, dtype=torch.float32
    )
    assert (adapted - logits(plain)).abs().max() > 1e-3
    assert export_hf.main([str(run.path), "--merge", "--out", str(merged)]) == 0
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    torch.testing.assert_close(logits(opened(merged, runs)), adapted, rtol=1e-5, atol=1e-5)
    kept = {path.name for path in (merged / "adapters").iterdir()}
    assert "adapter_config.json" in kept
    assert ("quantization_config.json" in kept) == (name == "nf4")


@pytest.mark.gate("runs")
def test_resume_rejects_another_adapter_base(runs: Runs, tmp_path: Path) -> None:
    """Weights outside the checkpoint must be those of its training."""
    base, other = runs.whole("plain").export_dir, tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(other)
    for path in base.glob("token*"):
        (other / path.name).write_bytes(path.read_bytes())
    words = (f"model.name={other}", f"model.init_from={other}")
    runs.train("lora", "zero1", tmp_path / "run", *words, "train.steps=2")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    model.save_pretrained(other)
    code = ExitCode.NO_CHECKPOINT
    output = runs.train("lora", "zero1", tmp_path / "run", *words, code=code)
    assert "probe batch" in output


@pytest.mark.gate("runs")
@pytest.mark.parametrize("name", ["lora", "nf4"])
def test_chat_works_before_and_after_adapter_training(name: str, runs: Runs) -> None:
    words = ("--prompt", "the model reads", "--tokens", "6", "--before")
    answers = {run_tool("chat", runs.whole(name).path, *words).stdout for _ in range(2)}
    (answer,) = answers  # the same one twice
    lines = answer.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[before]", "[after]"]


# --- what is read ---


def test_chats_have_a_template_and_answers_that_end(runs: Runs) -> None:
    run, template = runs.whole("chats"), tokenizer_of("llama3").chat_template
    assert (run.read_plan() or {})["data"]["tools"] == ["add"]
    export_hf.main([str(run.path)])
    (turns,) = chats(1, tools=True)
    for folder in (run.tokenizer_dir, run.export_dir):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == template
        tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
    shown = json.loads(run_tool("show_batch", run.path, "--step=1", "--json").stdout)
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    for sample in shown["samples"]:
        learned = [token for token in sample["targets"] if token is not None]
        assert 0 < learned.count(end) < len(learned) < len(sample["ids"])


def test_losses_of_sources_are_parts_of_the_loss(runs: Runs) -> None:
    """They cover the steps since the last line, by targets; the first step has its own line."""
    run = runs.whole("mixture")
    plan, lines, previous = run.read_plan() or {}, lines_of(run), 0
    assert plan["data_mixture"] == [[0, [7, 3]], [24, [1, 4]]]
    (packed, _) = events(run, "packed_whole")
    assert (packed["source"], packed["side"], packed["too_long"]) == ("pairs", "train", 0)
    spec = DataSpec.of_run(recorded_run(plan["run"]), plan["model_config"])
    stream = build_data(spec).train
    for step, line in lines.items():
        if "loss/texts" not in line:
            continue
        if step - previous == 1:
            texts, pairs = stream.targets_by_source(previous * 8 + np.arange(8))
            parts = texts * line["loss/texts"] + pairs * line["loss/pairs"]
            assert parts / (texts + pairs) == pytest.approx(line["loss"], rel=1e-6)
        previous = step
    assert {step for step, line in lines.items() if "loss/texts" in line} >= {2, 3, 4, 6}
    for step in (0, 3, 6):
        assert lines[step]["eval_loss"] == lines[step]["eval_loss/held"]
        assert 0 < lines[step]["eval_loss/own"] != lines[step]["eval_loss"]


def test_padding_is_less_than_without_groups(runs: Runs) -> None:
    run = runs.whole("padded")
    (batched,) = events(run, "batched")
    shares = [batched[f"{name}padding_share"] for name in ("", "plain_", "full_")]
    assert shares == sorted(shares)
    assert shares[0] < 0.75 * shares[1]  # these documents are short compared with multiples of 8
    lines = [line for line in run.read_metrics() if "loss" in line]
    assert all(0 <= line["padding_share"] < 0.5 for line in lines)
    assert all(0 <= line["data_wait_share"] <= 1 for line in lines)
    assert lines[-1]["tokens"] < len(lines) * 8 * 32


def test_batches_and_lengths_grow_as_planned(runs: Runs) -> None:
    """The batch grows with the first step that begins after 22 of 44 samples, and after 44; the
    sequences double after 16 and 32 of 32.
    """
    lines = [line for line in lines_of(runs.whole("ramp")).values() if "loss" in line]
    assert [line["global_batch"] for line in lines] == [4] * 6 + [8] * 3
    assert [line["samples"] for line in lines] == [4, 8, 12, 16, 20, 24, 32, 40, 48]
    assert [line["sequence_length"] for line in lines] == [8] * 4 + [16] * 3 + [32] * 2
    assert all(line["tokens"] == 32 * line["samples"] for line in lines)


def test_a_sample_of_what_was_read_is_kept_and_rehearsed(runs: Runs) -> None:
    first, second = runs.whole("plain"), runs.whole("rehearsed")
    facts = json.loads((first.reservoir_dir / "facts.json").read_text())
    assert facts["of"] == f"0:{(first.read_plan() or {})['data_fingerprint']}"
    assert facts["train_tokens"] == facts["held_out_tokens"] == 33
    assert len(IndexedTokens(first.reservoir_dir / "train").ids) == 33 * 6
    lines = lines_of(second)
    assert lines[0]["old_eval_loss"] != lines[2]["old_eval_loss"]
    old = lines_of(first)[FEATURES["plain"].steps]["eval_loss"]
    assert lines[0]["old_eval_loss"] == pytest.approx(old, rel=1e-5)
    assert {"loss/new", "loss/rehearsed"} <= lines[2].keys()
    assert (second.read_plan() or {})["data_mixture"] == [[0, [3, 1]]]


# --- what is computed ---


def test_every_step_has_the_load_of_the_experts(runs: Runs) -> None:
    lines = [line for line in runs.whole("experts").read_metrics() if "loss" in line]
    for line in lines:
        assert 1 <= line["expert_load_max"] <= 4  # experts
        assert 0 < line["expert_load_entropy"] <= 1
    assert len({line["expert_load_max"] for line in lines}) > 1


@pytest.mark.parametrize("name", ["smoothing", "depth"])
def test_regularisation_is_in_training_loss_only(name: str, runs: Runs) -> None:
    ours, theirs = lines_of(runs.whole(name)), lines_of(runs.whole("plain"))
    assert ours[0]["eval_loss"] == pytest.approx(theirs[0]["eval_loss"], rel=1e-6)
    assert ours[1]["loss"] != pytest.approx(theirs[1]["loss"], rel=1e-5)


def test_a_run_keeps_its_attention(runs: Runs, tmp_path: Path) -> None:
    """The kernel stays as at the start of the run; another window is rejected."""
    trained_in = "stages model.attention=varlen model.checkpointing=full"
    whole = runs.whole("documents", trained_in)
    run = runs.resumed(
        "documents", "stages model.checkpointing=full", tmp_path / "documents", whole=whole
    )
    plan = run.read_plan() or {}
    assert plan["run"]["model"]["attention"] == "varlen"
    assert plan["attention_why"] == "as at the start of the run"
    path = runs.whole("longformer").path
    output = runs.train("longformer", "stages", path, "model.attention_window=8", code=2)
    assert "attention_window is 8, but the run in this folder has 16" in output


@pytest.mark.parametrize("source", ["run", "export"])
@pytest.mark.parametrize(
    "name", [in_gate("reversible"), in_gate("reversible tensors"), in_gate("performer")]
)
def test_what_was_trained_begins_another_run(name: str, source: str, runs: Runs, tmp_path) -> None:
    """The first held-out loss equals the last one of the run that wrote the weights."""
    whole, layout = runs.whole(name), FEATURES[name].layout
    weights = whole.path if source == "run" else whole.export_dir
    words = (f"model.init_from={weights}", "train.steps=1")
    output = runs.train(name, layout, tmp_path / "begun", *words)
    if source == "run":
        assert f"starts with the weights of step {FEATURES[name].steps} of {whole.path}" in output
    last = lines_of(whole)[FEATURES[name].steps]["eval_loss"]
    first = lines_of(RunFolder(tmp_path / "begun"))[0]["eval_loss"]
    assert first == pytest.approx(last, rel=1e-5)


def test_a_reference_is_computed_once_and_again_if_lost(runs: Runs, tmp_path: Path) -> None:
    """Another run reads it; a resume without it computes it from the initial weights."""
    whole, (cache,) = runs.whole("preferences"), [*runs.folder.glob("data-preferences/cache")]
    runs.train("preferences", "one", tmp_path / "other", "train.beta=0.5")
    (found,) = events(RunFolder(tmp_path / "other"), "reference")
    shutil.rmtree(Path(found["path"]))
    resumed = runs.resumed("preferences", "one", tmp_path / "resumed")
    *_, again = events(resumed, "reference")
    assert [found["computed"], again["computed"]] == [False, True]
    assert Path(again["path"]).parent == cache
    keys = ("step", "loss", "eval_loss", "reward_margin")
    ends = [
        [line.get(key) for key in keys]
        for line in (whole.read_metrics()[-1], resumed.read_metrics()[-1])
    ]
    assert ends[0] == ends[1]
