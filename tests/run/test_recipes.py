"""The recipes of docs/recipes/: short, listed in the README, planned for their intended GPUs, and
each trained on small data to the loss stated in its first line.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.launch.fork_server import Zygote
from harness.plan.model_config import find_model_config
from harness.runfolder import RunFolder
from tests.data.chat_tokenizers import tokenizer_of
from tests.plan.plans import Planner
from tests.real_runs import REPOSITORY, SMALL_MODEL
from tests.run.features import write_lines

FOLDER = REPOSITORY / "docs" / "recipes"
LIMIT_S = 1500.0
README = (REPOSITORY / "README.md").read_text()
# In fp32, the same precision on every machine.
QUIET = (
    *("eval.samples=32", "sample.tokens=0", "save.export=false", "log.report=false"),
    "ds.bf16.enabled=false",
)
# Intended GPUs of a recipe, and the model whose weights it starts from.
MEANT = {
    "chat": ("RANKS=8 GPU=h100-80", "llama-3-8b"),
    "lora": ("RANKS=2 GPU=h100-80", "llama-3-8b"),
    "qlora": ("RANKS=1 GPU=rtx-4090", "llama-2-7b"),
    "tools": ("RANKS=8 GPU=h100-80", "llama-3-8b"),
    "continued": ("RANKS=8 GPU=h100-80", "llama-3-8b"),
    "long_context": ("RANKS=8 GPU=h100-80", "llama-3-8b"),
    "scratch": ("RANKS=8 GPU=h100-80", ""),
    "moe": ("RANKS=64 RANKS_PER_NODE=8 GPU=h100-80", ""),
    "recurrent": ("RANKS=1 GPU=rtx-4090", ""),
    "3d": ("RANKS=16 RANKS_PER_NODE=8 GPU=h100-80", ""),
}


@dataclass(frozen=True)
class Recipe:
    """A file of docs/recipes/, with the information in its first two lines."""

    path: Path

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


RECIPES = {path.stem: Recipe(path) for path in sorted(FOLDER.glob("*.toml"))}


@dataclass(frozen=True)
class Small:
    """A recipe's substitutes, besides its data: sizes of a small model, and a rate for it."""

    words: str = ""
    ranks: int = 2


_SMALL = " ".join(SMALL_MODEL)
_SHORT = (
    "data.seq_len=64 train.global_batch=8 train.micro_batch=4 optim.lr=0.01 optim.warmup_steps=10"
)
SMALL = {
    "chat": Small("data.seq_len=256"),
    "lora": Small("data.seq_len=256"),
    "qlora": Small("data.seq_len=256"),
    "tools": Small("data.seq_len=256"),
    "continued": Small("data.seq_len=128 train.global_batch=8 train.micro_batch=4 optim.lr=3e-3"),
    "long_context": Small(
        "model.overrides.max_position_embeddings=64 model.context=256 data.seq_len=256"
        " train.global_batch=4 train.micro_batch=4 train.steps=60 optim.lr=3e-3"
        " ds.sequence_parallel_size=2"
    ),
    "scratch": Small(f"{_SMALL} {_SHORT} train.steps=120 data.vocab_size=512"),
    "moe": Small(
        f"{_SMALL} {_SHORT} train.steps=100 data.vocab_size=512 model.overrides.num_experts=8"
        " model.overrides.num_experts_per_tok=2 model.overrides.moe_intermediate_size=64"
        " ds.expert_parallel.autoep_size=2"
    ),
    "recurrent": Small(
        f"{_SHORT} data.vocab_size=512 train.epochs=2 model.overrides.vocab_size=512"
        " model.overrides.hidden_size=64 model.overrides.recurrent_size=96"
        " model.overrides.num_hidden_layers=2"
    ),
    "3d": Small(f"{_SMALL} {_SHORT} train.steps=100 data.vocab_size=512", ranks=8),
}


_NUMBERS = {"a": "number", "b": "number"}
_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": _NUMBERS}}]


def _sums() -> Iterable[tuple[int, int]]:
    return ((a, b) for a in range(20) for b in range(15))


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


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the recipes name."""
    folder = tmp_path_factory.mktemp("corpora")
    write_lines(folder / "chats.jsonl", ({"messages": _turns(a, b)} for a, b in _sums()))
    write_lines(
        folder / "calls.jsonl", ({"messages": _calls(a, b), "tools": _TOOLS} for a, b in _sums())
    )
    write_lines(folder / "corpus.jsonl", _texts())
    return folder


@pytest.fixture(scope="module")
def weights(zygote: Zygote, corpora: Path) -> Path:
    """Return the export of a small model trained on chats of these words and numbers in any
    order.
    """
    draw, run = random.Random(1), corpora / "weights"

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
    json_path = REPOSITORY / "ds_configs" / "zero1.json"
    ended = zygote.run(
        [f"--deepspeed={json_path}", *words, f"run.dir={run}"],
        corpora / "logs",
        ranks=1,
        limit_s=LIMIT_S,
    )
    assert ended.codes == [0], ended.output
    return run / "export"


@pytest.mark.parametrize("name", RECIPES)
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
    machine, given = MEANT[name]
    if given:
        given = str(planned.add(given, find_model_config(given)[0]).parent)
    plan = planned(f"{machine} {' '.join(_words(RECIPES[name], corpora, given))}")
    assert plan.estimate is not None
    assert plan.estimate.verdict.startswith("fits")


@pytest.mark.gate("runs")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reaches_the_loss_that_its_first_line_states(
    name: str, zygote: Zygote, corpora: Path, weights: Path, tmp_path: Path
) -> None:
    recipe, small, run = RECIPES[name], SMALL[name], RunFolder(tmp_path / "run")
    words = (
        *(*_words(recipe, corpora, str(weights)), *small.words.split(), *QUIET),
        *(f"data.cache_dir={corpora / 'cache'}", f"run.dir={run.path}"),
    )
    ended = zygote.run(
        [*words], tmp_path / "logs", ranks=small.ranks, limit_s=LIMIT_S, cwd=REPOSITORY
    )
    assert ended.codes == [0] * small.ranks, ended.output
    reached = [line["eval_loss"] for line in run.read_metrics() if "eval_loss" in line]
    first, last = recipe.losses
    assert reached[0] == pytest.approx(first, rel=0.1)
    assert reached[-1] <= last < 0.7 * first
