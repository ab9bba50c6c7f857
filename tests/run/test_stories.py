"""Runs that stop early, learn nothing, sample or evaluate texts, end them, or add tokens."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.checkpoint.compatibility import recorded_run
from harness.data.batch import Batch
from harness.data.build import build_data
from harness.data.data import Data
from harness.data.needles import DEPTHS, NEEDLE_TEXTS, needles
from harness.data.spec import DataSpec
from harness.launch.fork_server import Zygote
from harness.models.skeleton import hf_config
from harness.run.evaluation import POSITIONS
from harness.runfolder import RunFolder
from tests.data.number_tokenizer import write_number_tokenizer
from tests.engine.small import MODEL
from tests.real_runs import SMALL_MODEL, events
from tests.run.features import in_gate, sentence, train, write_lines
from tools.export_hf import main


def data_of(run: RunFolder) -> Data:
    """Return the data that a run read."""
    plan = run.read_plan() or {}
    spec = DataSpec.of_run(recorded_run(plan["run"]), plan["model_config"])
    return build_data(spec)


@pytest.mark.gate("runs")
def test_a_run_that_learns_nothing_more_ends(zygote: Zygote, data: list[str], tmp_path) -> None:
    run, branch = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "branch")
    still = (*SMALL_MODEL, *data, "optim.lr=1e-12", "eval.every=1", "train.steps=9")
    patient = (*still, "eval.patience=2", "eval.better_by=0.01")
    train(zygote, "fp32", run.path, *patient)
    # The first, before any step, is the best; two more are enough.
    assert run.read_metrics()[-1]["step"] == 2
    (ended,) = events(run, "ended_early")
    assert (ended["step"], ended["best_step"]) == (2, 0)
    assert (run.read_status() or {})["outcome"] == "done"
    # It stays ended until it is given more patience.
    train(zygote, "fp32", run.path, *patient)
    assert run.read_metrics()[-1]["step"] == 2
    # A branch has as much patience as the run had at the start.
    train(zygote, "fp32", branch.path, *patient, "train.steps=6", f"resume.from={run.path}")
    assert branch.read_metrics()[-1]["step"] > 4
    train(zygote, "fp32", run.path, *still, "eval.patience=0")
    assert run.read_metrics()[-1]["step"] == 9


@pytest.mark.gate("runs")
def test_given_weights_are_sampled_on_request(zygote: Zygote, data: list[str], tmp_path) -> None:
    """With ZeRO 3, each token gathers all weights: a start must not wait for unrequested text."""

    def titles(name: str, *words: str) -> list[str]:
        run, short = RunFolder(tmp_path / name), ("sample.tokens=2", "train.steps=1")
        train(zygote, "zero3", run.path, *SMALL_MODEL, *data, *short, *words)
        return [event["title"] for event in events(run, "sample")]

    assert titles("first", "save.export=true") == ["sample"]
    weights = f"model.init_from={tmp_path / 'first' / 'export'}"
    assert titles("text", weights) == ["sample after training"]
    both = ["sample before training", "sample after training"]
    assert titles("asked", weights, "sample.prompt=the text") == both


# --- steps without a target ---


@pytest.mark.parametrize("policy", ["rollback", in_gate("log")])
def test_a_step_without_a_target_changes_nothing(policy: str, zygote: Zygote, tmp_path) -> None:
    """Its samples are parts of prompts only; the balancing loss would train the routers."""
    run, steps, batch, draw = RunFolder(tmp_path / "run"), 12, 2, random.Random(0)
    pairs = [
        {"prompt": sentence(draw, 60, 61), "completion": sentence(draw, 8, 9)} for _ in range(80)
    ]
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    experts = ("model.name=mixtral-8x7b", "model.overrides.num_local_experts=4")
    output = train(
        *(zygote, "zero1", run.path, *SMALL_MODEL, *experts),
        *(f"data.path={path}", f"data.cache_dir={tmp_path / 'cache'}", "data.seq_len=16"),
        *("data.packing=stream", f"train.steps={steps}", f"train.global_batch={batch}"),
        *("train.micro_batch=1", "eval.every=1", "guard.max_bad_steps=1"),
        *(f"guard.spikes={policy}", "guard.spike_window=8", f"save.every={steps}"),
    )
    read = data_of(run).train
    empty = [s for s in range(1, steps + 1) if not read.targets_in((s - 1) * batch, batch)]
    assert 1 < len(empty) < steps - 2
    lines = {line["step"]: line for line in run.read_metrics()}
    assert [step for step in range(1, steps + 1) if lines[step]["loss"] is None] == empty
    for step in range(1, steps + 1):
        is_same = lines[step]["eval_loss"] == lines[step - 1]["eval_loss"]
        assert is_same == (step in empty)  # not a bit has changed
        assert (lines[step]["grad_norm"] is None) == (step in empty)
        assert lines[step]["samples"] == step * batch
    skipped = events(run, "skipped_step")
    assert [(event["step"], event["loss"]) for event in skipped] == [(s, None) for s in empty]
    assert {event["reason"] for event in skipped} == {"none of its samples has a target token"}
    assert lines[steps]["skipped_steps"] == len(empty)
    assert events(run, "spike") == []
    assert "no target" in output


# --- the end of a text ---

# As in a preset: ids of another tokenizer.
FOREIGN = {"bos_token_id": 300, "eos_token_id": 301, "pad_token_id": 302}
TEXT = "the model reads a text"


@pytest.fixture(scope="module")
def ending(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a model that has learned to end: every document is the same sentence."""
    run = RunFolder(tmp_path_factory.mktemp("ends") / "run")
    texts = write_lines(run.path.with_name("texts.jsonl"), 400 * [{"text": TEXT}])
    output = train(
        *(zygote, "zero1", run.path, *SMALL_MODEL, "save.export=true", "data.seq_len=16"),
        *(f"model.overrides.{name}={value}" for name, value in FOREIGN.items()),
        *(f"data.path={texts}", f"data.cache_dir={run.path.with_name('cache')}"),
        *("train.steps=60", "train.global_batch=16", "train.micro_batch=8", "optim.lr=0.01"),
    )
    assert "special ids are set to the tokenizer's: bos_token_id 1 (was 300)" in output
    return run


def test_generation_ends_where_a_document_does(ending: RunFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ending.export_dir)
    model = AutoModelForCausalLM.from_pretrained(ending.export_dir)
    ids = tokenizer(TEXT[:9], return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        (written,) = model.generate(ids, max_new_tokens=100, do_sample=False)
    assert written[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(written, skip_special_tokens=True) == TEXT
    for name in ("config.json", "generation_config.json"):
        content = json.loads((ending.export_dir / name).read_text())
        assert [content.get(key) for key in FOREIGN] == [1, 2, None], name
    kept = (ending.tokenizer_dir / "tokenizer.model").read_bytes()  # in SentencePiece's format
    assert (ending.export_dir / "tokenizer.model").read_bytes() == kept


def test_what_weights_brought_stays(ending: RunFolder, zygote: Zygote, tmp_path, capsys) -> None:
    """Ends of turns and temperatures; also if no rank has the whole model."""
    model, run = tmp_path / "model", RunFolder(tmp_path / "run")
    ending.export_dir.rename(model)
    brought = {"eos_token_id": [0, 1, 300], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(brought))
    train(
        *(zygote, "pipeline2", run.path, f"model.name={model}", f"model.init_from={model}"),
        *(f"data.path={ending.path.with_name('texts.jsonl')}", "data.seq_len=16"),
        *(f"data.cache_dir={tmp_path / 'cache'}", "train.steps=1", "save.every=1"),
    )
    assert main([str(run.path)]) == 0
    assert "was 300" not in capsys.readouterr().out
    content = json.loads((run.export_dir / "generation_config.json").read_text())
    del content["transformers_version"]
    ends = [2, 1]  # 0 is <unk>, and 300 is a word
    assert content == {**brought, "bos_token_id": 1, "eos_token_id": ends, "pad_token_id": None}


# --- longer texts ---

TRAINED, LONGER = 128, 256  # tokens


@pytest.mark.gate("runs")
def test_long_context_losses_equal_transformers(zygote: Zygote, data: list[str], tmp_path) -> None:
    """Two steps of 64 positions, then six from their export, with 32 to 128 tokens."""
    first, run = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    words = (*data, "save.export=true", "eval.every=0", "log.every=1")
    short = ("model.overrides.max_position_embeddings=64", "data.seq_len=64", "train.steps=2")
    train(zygote, "zero1", first.path, *SMALL_MODEL, *words, *short, ranks=1)
    train(
        *(zygote, "zero1", run.path, *words, f"model.name={first.export_dir}"),
        *(f"model.init_from={first.export_dir}", f"data.tokenizer={first.export_dir}"),
        *(f"model.context={LONGER}", "model.rope=ntk", f"data.seq_len={TRAINED}"),
        *("ramp.length_from=32", "ramp.length_tokens=3072", "train.steps=6"),
        *(f"eval.seq_len={LONGER}", f"eval.needle_lengths=[128,{LONGER}]"),
    )
    lines, read = run.read_metrics(), data_of(run)
    lengths = [line["sequence_length"] for line in lines if "loss" in line]
    assert (lengths[0], lengths[-1]) == (32, TRAINED)
    assert read.long_held_out is not None
    samples = min(8 * TRAINED // LONGER, read.long_held_out.samples)  # of eval.samples
    losses = plain_losses(run, read.long_held_out.batch(0, samples))
    expected = losses.view(samples, POSITIONS, -1).mean((0, 2)).tolist()
    assert lines[-1]["loss_by_position"] == pytest.approx(expected, rel=1e-4)
    for length in (128, LONGER):
        batch = needles(read.held_out, read.tokenizer, length, 0, NEEDLE_TEXTS)
        asked, losses = batch.labels != -100, plain_losses(run, batch)
        expected = [
            math.exp(-float(losses[place :: len(DEPTHS)].sum() / asked[place :: len(DEPTHS)].sum()))
            for place in range(len(DEPTHS))
        ]
        assert lines[-1][f"needle/{length}"] == pytest.approx(expected, rel=1e-4)


def plain_losses(run: RunFolder, batch: Batch) -> torch.Tensor:
    """Return nats per token, (samples, tokens), by transformers alone; 0 without target."""
    model = AutoModelForCausalLM.from_pretrained(run.export_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    return functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")


# --- a tokenizer with more ids than the given weights have rows ---

ROWS, IDS = 398, 400
LORA = "model.lora.rank=4"
WHOLE = 'model.lora.modules_to_save=["embed_tokens", "lm_head"]'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights of 398 rows, a tokenizer of 400 ids, and a text with all of them."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = hf_config({**MODEL, "vocab_size": ROWS})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    write_number_tokenizer(folder / "tokenizer")
    text = " ".join(str(7 * number % IDS) for number in range(4000))
    (folder / "text.txt").write_text(text)
    return folder


def grown(zygote: Zygote, base: Path, run: Path, *words: str, layout: str = "zero2") -> str:
    """Train or resume a run from these weights; return its output."""
    return train(
        *(zygote, layout, run, "data.seq_len=16", "train.global_batch=4", "eval.samples=4"),
        *(f"data.path={base / 'text.txt'}", f"data.tokenizer={base / 'tokenizer'}"),
        *(f"model.init_from={base / 'model'}", f"data.cache_dir={base / 'cache'}"),
        *("save.export=true", *words),
    )


def mean_of(base: Path, name: str) -> torch.Tensor:
    return load_file(base / "model" / "model.safetensors")[name].mean(0)


@pytest.mark.gate("runs")
def test_a_run_adds_rows_says_so_and_exports_them(base: Path, zygote: Zygote, tmp_path) -> None:
    run = RunFolder(tmp_path / "run")
    output = grown(zygote, base, run.path, "train.steps=2", layout="zero3")
    assert "the vocabulary grows from 398 to 400 rows; each new row is the mean" in output
    (event,) = events(run, "new_rows")
    assert (event["before"], event["rows"]) == (ROWS, IDS)
    grown(zygote, base, run.path, "train.steps=4")  # in another layout
    assert len(events(run, "resumed")) == 1
    model = AutoModelForCausalLM.from_pretrained(run.export_dir)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == IDS
    assert len(model.get_output_embeddings().weight) == IDS


@pytest.mark.gate("runs")
@pytest.mark.parametrize("words", [(LORA,), (LORA, WHOLE)], ids=["frozen", "trained"])
def test_adapters_bring_the_rows_that_their_base_lacks(
    words: tuple[str, ...], base: Path, zygote: Zygote, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    output = grown(zygote, base, run.path, "train.steps=2", *words)
    assert f"after resize_token_embeddings({IDS})" in output
    (event,) = events(run, "new_rows")
    is_trained = WHOLE in words
    expected = "are trained (model.lora.modules_to_save)" if is_trained else "stay frozen"
    assert expected in event["message"]
    config = json.loads((run.export_dir / "adapter_config.json").read_text())
    assert config["modules_to_save"] == (["embed_tokens", "lm_head"] if is_trained else None)
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    model.resize_token_embeddings(IDS)
    peft = PeftModel.from_pretrained(model, str(run.export_dir))
    new = peft.get_input_embeddings().weight[-1]
    if not is_trained:  # otherwise as far as the few steps read it
        assert torch.allclose(new, mean_of(base, "model.embed_tokens.weight"))
    head = peft.get_output_embeddings().weight[-1]
    assert torch.allclose(head, mean_of(base, "lm_head.weight")) != is_trained
    merge = ("train.steps=2", "save.merge=true")
    assert "its probe loss is" in grown(zygote, base, tmp_path / "merged", *merge, *words)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "export")
    assert whole.config.vocab_size == len(whole.get_output_embeddings().weight) == IDS
    # Servers stop where the tokenizer says, as after any other run.
    eos = AutoTokenizer.from_pretrained(tmp_path / "merged" / "export").eos_token_id
    assert whole.generation_config.eos_token_id == whole.config.eos_token_id == eos
