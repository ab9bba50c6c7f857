"""The recipes of docs/recipes/ and the defaults of fine-tuning: planned, and trained to a loss."""

import json
import random
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.config.assignments import COUNTED, IMPLIED, KEPT
from harness.launch.fork_server import Zygote
from harness.plan.model_config import find_model_config
from harness.report.page import page_of
from harness.report.run_record import read
from harness.runfolder import RunFolder
from tests.data.chat_tokenizers import tokenizer_of
from tests.plan.plans import Planner
from tests.real_runs import REPOSITORY, SMALL_MODEL, events
from tests.run.features import write_lines
from tests.tables import beside

FOLDER = REPOSITORY / "docs" / "recipes"
JSON = f"--deepspeed={REPOSITORY / 'ds_configs' / 'zero1.json'}"
README = (REPOSITORY / "README.md").read_text()
# In fp32, the same precision on every machine.
QUIET = (
    *("eval.samples=32", "sample.tokens=0", "save.export=false", "log.report=false"),
    "ds.bf16.enabled=false",
)


@dataclass(frozen=True)
class Recipe:
    """A file of docs/recipes/, what it is meant for, and the sizes and ranks of a small run."""

    path: Path
    gpus: str
    words: str
    weights: str = ""
    ranks: int = 2

    @property
    def command(self) -> list[str]:
        """The words of its second line, after harness/train.py."""
        line = self.path.read_text().splitlines()[1]
        launcher, _, words = line.removeprefix("# ").partition(" harness/train.py ")
        assert launcher == "deepspeed"
        return shlex.split(words)

    @property
    def losses(self) -> tuple[float, float]:
        """The held-out loss in its first line, before and after training."""
        first, last = re.findall(
            r"held-out loss ([\d.]+) -> ([\d.]+)", self.path.read_text().splitlines()[0]
        )[0]
        return float(first), float(last)


_SHORT = (
    "data.seq_len=64 train.global_batch=8 train.micro_batch=4 optim.lr=0.01 optim.warmup_steps=10"
)
_SIZES = {"small": " ".join(SMALL_MODEL), "short": _SHORT}
RECIPES = {
    name: Recipe(FOLDER / f"{name}.toml", **{**row, "words": row["words"].format(**_SIZES)})
    for name, row in beside(__file__, "recipes.toml").items()
}


_NUMBERS = {"a": "number", "b": "number"}
_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": _NUMBERS}}]


def _texts() -> Iterable[dict[str, Any]]:
    """Yield documents of eight questions, each with its answer."""
    draw = random.Random(0)
    for _ in range(400):
        pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(8)]
        yield {"text": " ".join(f"what is {a} plus {b}? it is {a + b}." for a, b in pairs)}


def _turns(a: int, b: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"what is {a} plus {b}?"},
        {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
    ]


def _pair(a: int, b: int) -> dict[str, Any]:
    """Return a question with an answer and an evasion."""
    asked, answered = _turns(a, b)
    return {"prompt": asked["content"], "chosen": answered["content"], "rejected": f"{b} is {a}."}


def _calls(a: int, b: int) -> list[dict[str, Any]]:
    asked, answered = _turns(a, b)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
        answered,
    ]


def _words(recipe: Recipe, corpora: Path, weights: str) -> list[str]:
    """Return the words of a recipe's command, with files of `corpora` and other weights."""
    return [
        f"model.init_from={weights}"
        if word == "model.init_from=my-model"
        else word.replace("data.path=", f"data.path={corpora}/")
        for word in recipe.command
    ]


def train(
    zygote: Zygote, path: Path, *words: str, ranks: int = 1, cwd: Path | None = None
) -> tuple[RunFolder, str]:
    """Train a run with the harness's own defaults; return it with the output of its ranks."""
    arguments, logs = [*words, f"run.dir={path}"], path.with_name(f"{path.name}-logs")
    ended = zygote.run(arguments, logs, ranks=ranks, limit_s=1500.0, cwd=cwd)
    assert ended.codes == [0] * ranks, ended.output
    return RunFolder(path), ended.output


def losses_of(run: RunFolder) -> list[float]:
    return [line["eval_loss"] for line in run.read_metrics() if "eval_loss" in line]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the recipes name."""
    folder = tmp_path_factory.mktemp("corpora")
    sums = [(a, b) for a in range(20) for b in range(15)]
    calls = [{"messages": _calls(a, b), "tools": _TOOLS} for a, b in sums]
    write_lines(folder / "chats.jsonl", [{"messages": _turns(a, b)} for a, b in sums])
    write_lines(folder / "calls.jsonl", calls)
    write_lines(folder / "corpus.jsonl", _texts())
    write_lines(folder / "pairs.jsonl", [_pair(a, b) for a, b in sums])
    return folder


@pytest.fixture(scope="module")
def weights(zygote: Zygote, corpora: Path) -> Path:
    """Return the export of a model trained on these words and numbers in any order."""
    draw = random.Random(1)

    def turn(role: str, end: str) -> dict[str, str]:
        words = [
            draw.choice(("what", "is", "plus", "it", str(draw.randrange(50)))) for _ in range(8)
        ]
        return {"role": role, "content": " ".join(words) + end}

    chats = [{"messages": [turn("user", "?"), turn("assistant", ".")]} for _ in range(400)]
    tokenizer_of("chatml").save_pretrained(corpora / "tokenizer")
    words = (
        *(*SMALL_MODEL, *_SHORT.split(), *QUIET, "train.steps=100", "eval.every=0"),
        *("model.overrides.max_position_embeddings=4096", "model.overrides.vocab_size=600"),
        *(f"data.tokenizer={corpora / 'tokenizer'}", f"data.cache_dir={corpora / 'cache'}"),
        *(f"data.path={write_lines(corpora / 'before.jsonl', chats)}", "save.export=true"),
        *("data.learn=all", "data.packing=stream"),
    )
    return train(zygote, corpora / "weights", JSON, *words)[0].export_dir


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_a_recipe_is_short_and_a_row_of_the_readme(name: str) -> None:
    recipe = RECIPES[name]
    assert len(recipe.path.read_text().splitlines()) <= 15
    options = dict(zip(recipe.command[:4:2], recipe.command[1:4:2], strict=True))
    assert options["--config"] == f"docs/recipes/{name}.toml"
    json_name = options["--deepspeed"].removeprefix("ds_configs/")
    (row,) = re.findall(rf"^\| .*\]\(docs/recipes/{name}\.toml\).*$", README, re.MULTILINE)
    assert f"`{json_name}`" in row
    ((first, last),) = re.findall(r"\| ([\d.]+) → ([\d.]+) \|$", row)
    assert (float(first), float(last)) == recipe.losses
    keys = [word.partition("=")[0] for word in recipe.command[4:]]
    assert [key for key in keys if key not in ("data.path", "data.template")] == (
        ["model.init_from"] if "`model.init_from`" in row else []
    )
    assert ("data.template" in keys) == ("`data.template`" in row)


@pytest.mark.slow("the estimate of a GRU or LSTM is traced in another process")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_gpus_that_it_is_meant_for(
    name: str, planned: Planner, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    recipe = RECIPES[name]
    weights = recipe.weights
    if weights:
        weights = str(planned.add(weights, find_model_config(weights)[0]).parent)
    plan = planned(f"{recipe.gpus} {' '.join(_words(recipe, corpora, weights))}")
    assert plan.estimate is not None
    assert plan.estimate.verdict.startswith("fits")


@pytest.mark.gate("runs")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reaches_the_loss_that_its_first_line_states(
    name: str, zygote: Zygote, corpora: Path, weights: Path, tmp_path: Path
) -> None:
    recipe = RECIPES[name]
    words = (
        *(*_words(recipe, corpora, str(weights)), *recipe.words.split(), *QUIET),
        f"data.cache_dir={corpora / 'cache'}",
    )
    run, _ = train(zygote, tmp_path / "run", *words, ranks=recipe.ranks, cwd=REPOSITORY)
    reached, (first, last) = losses_of(run), recipe.losses
    assert reached[0] == pytest.approx(first, rel=0.1)
    assert reached[-1] <= last < 0.7 * first
    last_line = [*run.read_metrics()][-1]
    assert last_line.get("eval_preference_accuracy", 1) > 0.9


# --- fine-tuning as the README prints it ---


@pytest.fixture(scope="module")
def given(zygote: Zygote, corpora: Path) -> tuple[str, ...]:
    """Return the README's arguments: an untrained model, and 300 chats with a pattern to learn."""
    data = (
        *(f"data.path={corpora / 'chats.jsonl'}", f"data.cache_dir={corpora / 'cache'}"),
        *("data.template=chatml", "data.seq_len=64", "eval.samples=8"),
    )
    made = (*SMALL_MODEL, "data.vocab_size=512", "train.steps=0", "save.export=true")
    base, _ = train(zygote, corpora / "base", JSON, *QUIET, *data, *made)
    return (JSON, *QUIET, f"model.init_from={base.export_dir}", *data)


@pytest.mark.slow("three runs, one of a hundred steps")
def test_the_defaults_learn_and_are_kept(zygote: Zygote, given: tuple[str, ...], tmp_path) -> None:
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
    assert "the held-out loss hardly improved" in end
    assert [len(events(run, kind)) for kind in ("unfinished_warmup", "few_steps", "no_better")] == [
        *(1, 1, 1)
    ]
    page = page_of(read(run.path))
    assert all(
        text in page for text in ("ends during its warm-up", "takes only", "hardly improved")
    )
    assert "Train longer" in page
    assert "Try the model" not in page
    assert "Export the weights" not in page
    assert json.loads(run.plan_path.read_text())["held_out_set"]
