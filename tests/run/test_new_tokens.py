"""Runs whose tokenizer has more ids than the given weights have rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.models.skeleton import hf_config
from harness.runfolder import RunFolder
from tests.data.number_tokenizer import write_number_tokenizer
from tests.engine.small import MODEL
from tests.real_runs import REPOSITORY, SHORT_RUN, TRAIN, Ended, events, run_ranks

ROWS, IDS = 398, 400
SHORT = (*SHORT_RUN, "data.seq_len=16", "train.global_batch=4", "eval.samples=4")
LORA = "model.lora.rank=4"
WHOLE = 'model.lora.modules_to_save=["embed_tokens", "lm_head"]'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights of 398 rows, a tokenizer of 400 ids, and a text with all of
    them.
    """
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = hf_config({**MODEL, "vocab_size": ROWS})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    write_number_tokenizer(folder / "tokenizer")
    text = " ".join(str(7 * number % IDS) for number in range(4000))
    (folder / "text.txt").write_text(text)
    return folder


def train(base: Path, run: Path, *words: str, json_file: str = "zero2.json") -> Ended:
    command: list[Any] = [
        sys.executable,
        TRAIN,
        "--deepspeed",
        REPOSITORY / "ds_configs" / json_file,
    ]
    data = (f"data.path={base / 'text.txt'}", f"data.tokenizer={base / 'tokenizer'}")
    given = (f"model.init_from={base / 'model'}", f"data.cache_dir={base / 'cache'}")
    command += [*SHORT, *data, *given, f"run.dir={run}", "save.export=true", *words]
    return run_ranks(command, run.parent).succeeded()


def mean_of(base: Path, name: str) -> torch.Tensor:
    return load_file(base / "model" / "model.safetensors")[name].mean(0)


@pytest.mark.gate("runs")
def test_a_run_adds_rows_says_so_resumes_and_exports_them(base: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    output = train(base, run.path, "train.steps=2", json_file="zero3.json").output
    assert "the vocabulary grows from 398 to 400 rows; each new row is the mean" in output
    (event,) = events(run, "new_rows")
    assert (event["before"], event["rows"]) == (ROWS, IDS)
    train(base, run.path, "train.steps=4")  # in another layout
    assert len(events(run, "resumed")) == 1
    model = AutoModelForCausalLM.from_pretrained(run.export_dir)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == IDS
    assert len(model.get_output_embeddings().weight) == IDS


@pytest.mark.gate("runs")
@pytest.mark.parametrize("words", [(LORA,), (LORA, WHOLE)], ids=["frozen", "trained"])
def test_adapters_bring_the_rows_that_their_base_lacks(
    words: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    run = RunFolder(tmp_path / "run")
    output = train(base, run.path, "train.steps=2", *words).output
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
    merged = train(base, tmp_path / "merged", "train.steps=2", "save.merge=true", *words)
    assert "its probe loss is" in merged.output
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "export")
    assert whole.config.vocab_size == len(whole.get_output_embeddings().weight) == IDS
    # Servers stop where the tokenizer says, as after any other run.
    eos = AutoTokenizer.from_pretrained(tmp_path / "merged" / "export").eos_token_id
    assert whole.generation_config.eos_token_id == whole.config.eos_token_id == eos
