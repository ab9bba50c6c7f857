"""Families beyond the usual ones: divided, and trained for docs/families.md."""

import re

import pytest

from harness.launch.fork_server import Zygote
from tests.gates.hybrids import HYBRIDS, NEWER
from tests.gates.train_families import Runs, write_corpus
from tests.real_runs import REPOSITORY
from tests.run_tools import run_tool


@pytest.mark.gate("models")
def test_divided_families_have_undivided_loss_and_gradients() -> None:
    # Windows and a separate norm for queries; parallel layers; biases; a trained activation.
    families = ("gemma3_text", "cohere2", "starcoder2", "apertus")
    done = run_tool("compare_divided", "--families", *families)
    assert f"{len(families)} families compared, 0 differ" in done.stdout
    refused = run_tool("compare_divided", "--families", "mamba", code=2)
    assert "no plan to divide mamba; there are " in refused.stdout


def test_families_on_the_page_are_trained_resumed_and_exported() -> None:
    text = (REPOSITORY / "docs/families.md").read_text(encoding="utf-8")
    page, newer = text.split("## New decoders")
    rows = dict(re.findall(r"^\| (\w+) \| (yes \| yes \| yes) \|", page, re.MULTILINE))
    assert {*rows} == {*HYBRIDS}
    assert len(rows) == len(re.findall(r"^\| \w+ \|.*\|$", page, re.MULTILINE)) - 1
    assert all(re.search(rf"\b{name}\b", newer) for name in NEWER)


@pytest.mark.gate("models")
@pytest.mark.parametrize("family", ["mamba2", "recurrent_gemma", "falcon_h1", "xlstm"])
def test_families_train_resume_elsewhere_and_export(family: str, zygote: Zygote, tmp_path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 60)
    runs = Runs(zygote, HYBRIDS[family], tmp_path / family)
    assert runs.run("resumed", 1, "train.steps=2") == "yes"
    assert runs.run("resumed", 3, "train.steps=4") == "yes"
    assert runs.exported() == "yes"
