"""tools/chat.py: the models that it opens, its answers, its refusals."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.data.tokenizer_files import SpecialIds
from harness.errors import ConfigError
from harness.models import export_code
from harness.models.skeleton import hf_config
from harness.runfolder import RunFolder
from tests.data.chat_tokenizers import tokenizer_of
from tests.engine.small import MODEL
from tests.run_tools import run_tool
from tools.chat import _parser, _speakers, end_of_turn
from tools.chat import _printer as printer_of
from tools.exported import opened


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a chat template, in the form of an export."""
    folder = tmp_path_factory.mktemp("exported")
    tokenizer = tokenizer_of("chatml")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = SpecialIds.of(tokenizer).in_place_of(MODEL)
    config = {**MODEL, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    AutoModelForCausalLM.from_config(hf_config(config)).save_pretrained(folder)
    return folder


def test_an_export_whose_package_is_missing_is_one_error(exported: Path) -> None:
    missing = mock.patch.object(export_code, "opened_as_trained", side_effect=ImportError("no"))
    with missing, pytest.raises(ConfigError, match="cannot be opened: no"):
        opened(exported, trust_remote_code=False)


def talk(folder: Path, *words: str, said: str = "") -> str:
    return run_tool("chat", folder, *words, said=said).stdout


def test_lines_are_answered_until_the_end(exported: Path) -> None:
    said = "what is this?\n\nand this?\n"
    answers, longer = (talk(exported, f"--tokens={most}", said=said) for most in (4, 40))
    assert len(answers) < len(longer)
    assert len(answers.splitlines()) >= 2
    assert "<|im_end|>" not in answers


def test_a_run_is_asked_with_template_values_and_tools(exported: Path, tmp_path, capsys) -> None:
    shutil.copytree(exported, RunFolder(tmp_path).export_dir)
    template = "{{ mood if add_generation_prompt }} {{ tools|length if tools }} {{ messages }}"
    (RunFolder(tmp_path).export_dir / "chat_template.jinja").write_text(template)
    plan = {"run": {"data": {"template_values": {"mood": "glad"}}}, "data": {"tools": ["add"]}}
    RunFolder(tmp_path).plan_path.write_text(json.dumps(plan))
    (tmp_path / "tools.json").write_text('[{"name": "add", "parameters": {}}]')
    with_tools = ["--tools", str(tmp_path / "tools.json")]
    for words, begins, is_told in ((with_tools, "glad 1 [", False), ([], "glad  [", True)):
        (speaker,) = _speakers(_parser().parse_args([str(tmp_path), *words]))
        speaker.turns.append({"role": "user", "content": "hi"})
        assert speaker.tokenizer.decode(speaker._ids("hi")[0]).startswith(begins)
        assert ("trained with tools (add)" in capsys.readouterr().err) == is_told
    (tmp_path / "tools.json").write_text("[1]")
    words = [str(tmp_path), "--tools", str(tmp_path / "tools.json")]
    with pytest.raises(ConfigError, match="tools must be an array of objects"):
        _speakers(_parser().parse_args(words))


@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_a_turn_is_not_shown(special: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Even if the template's marker is text of several tokens, as for a base model."""
    tokenizer = tokenizer_of("chatml" if special else "phi")
    tokenizer.chat_template = tokenizer_of("chatml").chat_template
    end = end_of_turn(tokenizer)
    assert end == "<|im_end|>"
    printer = printer_of(tokenizer, end)
    ids = tokenizer("ab <|im_end|>", add_special_tokens=False)["input_ids"]
    printer.put(torch.tensor([[0]]))  # the prompt
    for token in ids:
        printer.put(torch.tensor([token]))
    printer.end()
    assert capsys.readouterr().out.strip() == "ab"


@pytest.mark.gate("tools")
def test_a_prompt_is_answered_alike_again(exported: Path) -> None:
    drawn = ("--prompt=hello", "--tokens=8", "--temperature=1", "--seed=3")
    assert talk(exported, *drawn) == talk(exported, *drawn)
    assert talk(exported, *drawn) != talk(exported, *drawn[:-1], "--seed=4")


@pytest.mark.gate("tools")
def test_what_cannot_be_opened_is_named(exported: Path, tmp_path: Path) -> None:
    assert "neither a run nor an exported" in run_tool("chat", tmp_path, code=2).stderr
    refused = run_tool("chat", exported, "--before", "--prompt=x", code=2)
    assert "did not start from pretrained weights" in refused.stderr
    (tmp_path / "plan.json").write_text("{}")
    assert "python tools/export_hf.py" in run_tool("chat", tmp_path, code=2).stderr
