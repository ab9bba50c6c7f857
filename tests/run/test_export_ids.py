"""An export ends its texts where training ended its documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.runfolder import RunFolder
from tests.two_ranks import SHORT_RUN, SMALL_MODEL
from tools.export_hf import main
from tools.proofs.zygote import Zygote

pytestmark = pytest.mark.slow
# As a preset's: ids of another tokenizer.
FOREIGN = {"bos_token_id": 300, "eos_token_id": 301, "pad_token_id": 302}
LEARNS = ("train.steps=60", "train.global_batch=16", "optim.lr=0.01", "data.seq_len=16")
TEXT = "the model reads a text"


@pytest.fixture(scope="module")
def run(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A model that has learned to end: every document is the same sentence."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "texts.jsonl").write_text(400 * (json.dumps({"text": TEXT}) + "\n"))
    overrides = [f"model.overrides.{name}={value}" for name, value in FOREIGN.items()]
    data = [f"data.path={folder / 'texts.jsonl'}", f"data.cache_dir={folder / 'cache'}"]
    words = [*SMALL_MODEL, *SHORT_RUN, *LEARNS, *overrides, *data, "save.export=true"]
    ended = zygote.run([*words, f"run.dir={folder / 'run'}"], folder / "logs")
    assert ended.codes == [0, 0], ended.output
    assert "special ids are the tokenizer's: bos_token_id 1 (was 300)" in ended.output
    return RunFolder(folder / "run")


def test_generation_ends_where_a_document_does(run: RunFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run.export_dir)
    model = AutoModelForCausalLM.from_pretrained(run.export_dir)
    ids = tokenizer(TEXT[:9], return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        (found,) = model.generate(ids, max_new_tokens=100, do_sample=False)
    assert found[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(found, skip_special_tokens=True) == TEXT


def test_both_configs_have_the_tokenizers_ids(run: RunFolder) -> None:
    for name in ("config.json", "generation_config.json"):
        content = json.loads((run.export_dir / name).read_text())
        found = [content.get(key) for key in FOREIGN]
        assert found == [1, 2, None], name


def test_sentencepieces_model_is_kept_and_exported(run: RunFolder) -> None:
    kept = (run.tokenizer_dir / "tokenizer.model").read_bytes()
    assert (run.export_dir / "tokenizer.model").read_bytes() == kept


def test_what_the_weights_brought_stays(
    run: RunFolder, zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ends of turns, temperatures; also where no rank has the whole model."""
    model = tmp_path / "model"
    run.export_dir.rename(model)
    path = model / "generation_config.json"
    brought = {"eos_token_id": [0, 1, 300], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    path.write_text(json.dumps(brought))
    json_path = Path(__file__).parents[2] / "ds_configs" / "pipeline2.json"
    words = [f"--deepspeed={json_path}", f"model.name={model}", f"model.init_from={model}"]
    data = [f"data.path={run.path.parent / 'texts.jsonl'}", f"data.cache_dir={tmp_path / 'cache'}"]
    folder = RunFolder(tmp_path / "run")
    words += [*SHORT_RUN, *data, "data.seq_len=16", "train.steps=1", f"run.dir={folder.path}"]
    ended = zygote.run([*words, "save.every=1"], tmp_path / "logs")
    assert ended.codes == [0, 0], ended.output
    assert main([str(folder.path)]) == 0
    assert "was 300" not in capsys.readouterr().out
    content = json.loads((folder.export_dir / "generation_config.json").read_text())
    del content["transformers_version"]
    assert content == {
        **brought,
        "bos_token_id": 1,
        "eos_token_id": [2, 1],  # 0 is <unk>, and 300 a word
        "pad_token_id": None,
    }
