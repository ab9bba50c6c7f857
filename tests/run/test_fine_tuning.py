"""Fine-tuning as the README prints it: its defaults learn, persist, and report what is too
short.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.config.assignments import COUNTED, IMPLIED, KEPT
from harness.launch.fork_server import Zygote
from harness.report.page import page_of
from harness.report.run_record import read
from harness.runfolder import RunFolder
from tests.real_runs import REPOSITORY, SMALL_MODEL, events
from tests.run.features import write_lines

JSON = f"--deepspeed={REPOSITORY / 'ds_configs' / 'zero1.json'}"
QUIET = ("eval.samples=8", "sample.tokens=0", "log.report=false", "ds.bf16.enabled=false")


def train(zygote: Zygote, path: Path, *words: str, ranks: int = 1) -> tuple[RunFolder, str]:
    """Train a run with the harness's own defaults; return it with the output of its ranks."""
    arguments = [JSON, *QUIET, *words, f"run.dir={path}"]
    ended = zygote.run(arguments, path.with_name(f"{path.name}-logs"), ranks=ranks)
    assert ended.codes == [0] * ranks, ended.output
    return RunFolder(path), ended.output


@pytest.fixture(scope="module")
def given(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the README's arguments: an untrained model, and 300 chats with a pattern to learn."""
    folder = tmp_path_factory.mktemp("chats")
    chats = [
        [
            {"role": "user", "content": f"what is {a} plus {b}?"},
            {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
        ]
        for a in range(20)
        for b in range(15)
    ]
    path = write_lines(folder / "chats.jsonl", [{"messages": turns} for turns in chats])
    data = (f"data.path={path}", "data.template=chatml", f"data.cache_dir={folder / 'cache'}")
    made = (*SMALL_MODEL, "data.vocab_size=512", "train.steps=0", "data.seq_len=64")
    train(zygote, folder / "base", *data, *made)
    weights = f"model.init_from={folder / 'base' / 'export'}"
    return (weights, *data, "data.seq_len=64", "save.export=false")


def losses_of(run: RunFolder) -> list[float]:
    return [line["eval_loss"] for line in run.read_metrics() if "eval_loss" in line]


@pytest.mark.slow("three runs, one of a hundred steps")
def test_the_defaults_learn_and_are_kept(
    zygote: Zygote, given: tuple[str, ...], tmp_path: Path
) -> None:
    run, output = train(zygote, tmp_path / "run", *given, ranks=2)
    plan = run.read_plan() or {}
    batch, epochs = plan["global_batch"], plan["run"]["train"]["epochs"]
    assert plan["run_set"]["train.global_batch"] == plan["run_set"]["train.epochs"] == COUNTED
    assert plan["run_set"]["optim.lr"] == IMPLIED
    assert 100 <= plan["total_steps"] < 200
    assert plan["deepspeed"]["train_batch_size"] == batch < 48
    examples, windows = (plan["data"][f"trained_{name}"] for name in ("examples", "windows"))
    assert 290 < examples < 300
    length = f"{examples} examples in {windows} windows of 64 tokens, {batch} windows per step"
    assert length in output
    (settled,) = events(run, "follows_data")
    assert settled["message"].startswith(f"train.global_batch={batch}, train.epochs={epochs:g}: ")
    first, *_, last = losses_of(run)
    assert last < 0.6 * first
    assert re.search(rf"nats per token, {first:.2f} before training; a unigram", output)
    assert events(run, "few_steps") + events(run, "no_better") == []
    # Resumed on another number of ranks, for longer.
    more = f"train.steps={plan['total_steps'] + 3}"
    train(zygote, run.path, *given, more)
    again = run.read_plan() or {}
    assert (again["global_batch"], again["world"]["world_size"]) == (batch, 1)
    assert again["run"]["optim"] == plan["run"]["optim"]
    assert again["run_set"]["train.global_batch"] == again["run_set"]["optim.lr"] == KEPT
    (resumed,) = events(run, "resumed")
    changed = {change["key"] for change in resumed["changes"]}
    assert not {key for key in changed if key.startswith("optim.")} | changed & {
        "train.global_batch"
    }


def test_a_run_that_was_too_short_says_so_with_the_keys(
    zygote: Zygote, given: tuple[str, ...], tmp_path: Path
) -> None:
    short = ("train.global_batch=48", "train.epochs=1", "optim.warmup_steps=20", "optim.lr=1e-6")
    run, output = train(zygote, tmp_path / "run", *given, *short)
    steps = (run.read_plan() or {})["total_steps"]
    assert steps < 20
    texts = [
        f"the run of {steps} steps ends during its warm-up (20 steps, optim.warmup_steps)",
        f"the run takes only {steps} steps",
    ]
    for text in texts:  # once the data is counted, and at the end
        assert output.count(text) == 2
    assert "lower train.global_batch (now 48), or raise train.epochs" in output
    end = output.partition("nats per token")[2]
    assert "the held-out loss did not improve" in end
    assert [len(events(run, kind)) for kind in ("unfinished_warmup", "few_steps", "no_better")] == [
        *(1, 1, 1)
    ]
    page = page_of(read(run.path))
    assert all(
        text in page for text in ("ends during its warm-up", "takes only", "did not improve")
    )
    assert "Train longer" in page
    assert "Try the model" not in page
    assert "Export the weights" not in page
    assert json.loads(run.plan_path.read_text())["held_out_set"]
