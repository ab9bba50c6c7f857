"""A run on chats: what it learns, resumes with, exports and shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from harness.runfolder import RunFolder
from tests.data.chat_tokenizers import tokenizer_of, write_chats
from tests.two_ranks import REPOSITORY, environment, run_ranks, train_command

pytestmark = pytest.mark.slow


def test_chats_are_trained_on_resumed_exported_and_shown(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama3")
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    records = write_chats(tmp_path / "chats.jsonl", 60, tools=True)

    def train(steps: int) -> None:
        command = train_command(
            f"--deepspeed={REPOSITORY / 'ds_configs' / 'fp32.json'}",
            f"data.path={tmp_path / 'chats.jsonl'}",
            f"data.tokenizer={tmp_path / 'tokenizer'}",
            f"data.cache_dir={tmp_path / 'cache'}",
            *("data.template=llama3", "data.seq_len=512", "data.held_out=0.2"),
            *("train.global_batch=4", "eval.samples=4", "optim.name=sgd", "sample.tokens=2"),
            *("model.overrides.vocab_size=600", "model.overrides.num_hidden_layers=1"),
            *(f"train.steps={steps}", "save.export=true", f"run.dir={tmp_path / 'run'}"),
        )
        run_ranks(command, tmp_path / "logs" / str(steps), ranks=1).succeeded()

    train(1)
    first = RunFolder(tmp_path / "run").read_plan()
    train(2)
    again = RunFolder(tmp_path / "run").read_plan()
    assert first is not None
    assert again is not None
    assert again["data_fingerprint"] == first["data_fingerprint"]

    turns = records[0]["messages"]
    for folder in ("tokenizer", "export"):
        exported = AutoTokenizer.from_pretrained(tmp_path / "run" / folder)
        assert exported.chat_template == template
        exported.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)

    tool = [sys.executable, str(REPOSITORY / "tools" / "show_batch.py"), str(tmp_path / "run")]
    done = subprocess.run(
        [*tool, "--step=1", "--json"], env=environment(), capture_output=True, text=True, check=True
    )
    for sample in json.loads(done.stdout)["samples"]:
        learned = [token for token in sample["targets"] if token is not None]
        ends = exported.convert_tokens_to_ids("<|eot_id|>")
        assert 0 < learned.count(ends) < len(learned) < len(sample["ids"])
