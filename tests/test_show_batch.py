"""show_batch.py is correct: from its output, transformers alone computes the logged loss."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, run_ranks, train_command
from tests.run_tools import run_tool

WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905
pytestmark = pytest.mark.gate("tools")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the same job twice: without steps, with its export; and with two steps."""
    folder = tmp_path_factory.mktemp("show")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(_question(number)) + "\n" for number in range(200)))
    common = [
        f"--deepspeed={REPOSITORY / 'ds_configs' / 'fp32.json'}",
        f"data.path={data}",
        f"data.cache_dir={folder / 'cache'}",
        "data.held_out=0.2",
        "train.seed=3",
        "optim.name=sgd",  # nothing to compile, and the first loss precedes any step
    ]
    for name, more in (
        ("start", ["train.steps=0", "save.export=true"]),
        ("run", ["train.steps=2"]),
    ):
        command = train_command(*common, *more, f"run.dir={folder / name}")
        run_ranks(command, folder / "logs" / name, ranks=1).succeeded()
    return folder / "start", folder / "run"


def _question(number: int) -> dict[str, str]:
    """Return a pair; their lengths vary, so that targets fall unevenly on samples."""
    words = [WORDS[(number * 7 + place) % len(WORDS)] for place in range(3 + number % 11)]
    return {"prompt": " ".join(words) + "?", "completion": " " + " ".join(words[::-2]) + "."}


@pytest.fixture(scope="module")
def show(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that runs the tool as a command in another folder."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    @functools.cache
    def run(*arguments: str) -> str:
        return run_tool("show_batch", runs[1], *arguments, cwd=elsewhere).stdout

    return run


@torch.no_grad()
def loss_of(shown: dict[str, Any], export: Path) -> float:
    """Return the mean cross-entropy over the targets of a step, from the tool's output."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    samples = shown["samples"]
    ids, positions = (torch.tensor([s[key] for s in samples]) for key in ("ids", "positions"))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    targets = [-100 if target is None else target for s in samples for target in s["targets"]]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets)))


def test_transformers_logs_the_same_loss(runs: tuple[Path, Path], show: Callable[..., str]) -> None:
    start, run = runs
    first, second = (json.loads(show("--step", step, "--json")) for step in "12")
    lines = RunFolder(run).read_metrics()
    logged = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert loss_of(first, start / "export") == pytest.approx(logged[1], rel=2e-6)
    # Any other batch is detected.
    assert loss_of(second, start / "export") != pytest.approx(logged[1], rel=1e-4)


def test_samples_say_what_is_learned(runs: tuple[Path, Path], show: Callable[..., str]) -> None:
    shown = json.loads(show("--step", "2", "--json"))
    tokenizer = AutoTokenizer.from_pretrained(runs[0] / "export")
    assert [sample["index"] for sample in shown["samples"]] == list(range(8, 16))
    targets = [target for sample in shown["samples"] for target in sample["targets"]]
    assert shown["target_tokens"] == len(targets) - targets.count(None)
    assert 0 < targets.count(None) < len(targets)
    for sample in shown["samples"]:
        assert sample["text"] == tokenizer.decode(sample["ids"])
        following = zip(sample["ids"][1:], sample["targets"], strict=False)
        assert all(target in (None, token) for token, target in following)
        lengths = [each["end_token"] - each["first_token"] for each in sample["documents"]]
        padding = len(sample["ids"]) - sum(lengths)  # its positions count from 1
        documents = [place for length in lengths for place in range(length)]
        assert sample["positions"] == [*documents, *range(1, padding + 1)]
