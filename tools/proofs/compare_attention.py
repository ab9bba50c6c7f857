"""Compare how well kinds of attention, an LSTM and a GRU learn, over several seeds.

    python tools/proofs/compare_attention.py --folder /tmp/kinds --write docs/learning.md

Two tasks, of equally many tokens for all: to repeat symbols after 500 blanks (the copying task of
arXiv 1511.06464), and the default corpus. Two runs at a time, one CPU rank each.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from harness.layout.attention_table import ATTENTIONS
from harness.runfolder import RunFolder
from tools.figure import new_figure, write_plot
from tools.made_with import versions
from tools.proofs.small_runs import SMALL_MODEL, lines_with, mean_and_spread, trained
from tools.proofs.zygote import Zygote

SYMBOLS, REPEATED, DISTANCE = 8, 10, 512
SEQ_LEN = {"copying": DISTANCE + REPEATED + 1, "corpus": 1024}
GUESSED = REPEATED / (REPEATED + 1) * math.log(SYMBOLS)
"""Mean loss in nats of symbols drawn by chance and an end that is certain."""
EXACT = "sdpa"
KINDS = [EXACT, *(name for name, row in ATTENTIONS.items() if row.sizes)]
RECURRENT = {"lstm": 80, "gru": 96}
"""Sizes of cells that have about as many weights as a layer of the small model."""
_JOBS = 2
_COMMON = (*("optim.warmup_steps=20", "optim.schedule=cosine"),)
_TASKS = {
    "copying": ("train.steps=200", "train.global_batch=4", "eval.samples=32", "eval.every=20"),
    "corpus": ("train.steps=150", "train.global_batch=2", "eval.samples=32", "eval.every=30"),
}


def main(argv: list[str]) -> int:
    """argv -> runs -> page and picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="runs, which go on there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate of all runs")
    parser.add_argument("--write", type=Path, help="page to write, with a picture beside it")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    words = {"copying": copying(folder), "corpus": ["data.vocab_size=1024"]}
    runs: dict[tuple[str, str, int], RunFolder] = {}

    def run(task: str, kind: str, seed: int) -> None:
        zygote = zygotes.get()
        try:
            own = [*_COMMON, *_TASKS[task], *words[task], f"data.seq_len={SEQ_LEN[task]}"]
            own += [f"data.cache_dir={folder / 'cache'}", f"train.seed={seed}"]
            own += [f"optim.lr={arguments.rate}"]
            model = model_words(kind, folder, task)
            done = trained(zygote, folder / f"{task}-{kind}-{seed}", own, model)
        finally:
            zygotes.put(zygote)
        runs[task, kind, seed] = done
        print(task, kind, seed, _last(done), flush=True)

    zygotes: queue.SimpleQueue[Zygote] = queue.SimpleQueue()
    with ExitStack() as stack, ThreadPoolExecutor(_JOBS) as pool:
        for _ in range(_JOBS):
            zygotes.put(stack.enter_context(Zygote()))
        each = [
            (task, kind, seed)
            for task in _TASKS
            for seed in range(arguments.seeds)
            for kind in (*KINDS, *RECURRENT)
        ]
        # The first of a task makes its cache.
        run(*each[0])
        list(pool.map(lambda cell: run(*cell), each[1:]))
    text = page(runs, arguments.seeds, arguments.rate)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
        draw(runs, arguments.seeds, arguments.write.with_suffix(".svg"))
    return 0


def copying(folder: Path) -> list[str]:
    """Write the copying task, and a tokenizer of its symbols; return the words of a run on it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    symbols = [f"s{n}" for n in range(SYMBOLS)]
    vocabulary = {word: n for n, word in enumerate(["</s>", "_", ">", *symbols])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="_"
    ).save_pretrained(folder / "symbols")
    draw_symbols = random.Random(0)
    path = folder / "copying.jsonl"
    with path.open("w") as lines:
        for _ in range(12_000):
            text = " ".join(draw_symbols.choices(symbols, k=REPEATED))
            blanks = " ".join("_" * (DISTANCE - REPEATED - 1))
            record = {"prompt": f"{text} {blanks} >", "completion": f" {text}"}
            lines.write(json.dumps(record) + "\n")
    return [f"data.path={path}", f"data.tokenizer={folder / 'symbols'}"]


def model_words(kind: str, folder: Path, task: str) -> list[str]:
    """Return what makes the small model one of this kind, of the task's vocabulary."""
    rows = 16 if task == "copying" else 1024
    if kind not in RECURRENT:
        return [*SMALL_MODEL, f"model.attention={kind}", f"model.overrides.vocab_size={rows}"]
    path = folder / f"{task}-{kind}-model"
    path.mkdir(exist_ok=True)
    sizes = {"hidden_size": 64, "recurrent_size": RECURRENT[kind], "num_hidden_layers": 2}
    config = {"model_type": "recurrent", "cell": kind, "vocab_size": rows, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    # A sample of the copying task is one document, so that nothing is packed.
    return [f"model.name={path}", "data.document_mask=false"]


def _last(run: RunFolder) -> float:
    return float(lines_with(run, "eval_loss")[-1]["eval_loss"])


def page(runs: dict[tuple[str, str, int], RunFolder], seeds: int, rate: float) -> str:
    """Return the table of both tasks as a page."""
    rows = []
    for kind in (*KINDS, *RECURRENT):
        losses = {task: [_last(runs[task, kind, seed]) for seed in range(seeds)] for task in _TASKS}
        rows.append(
            f"| `{kind}` | {_sizes(kind)} | {mean_and_spread(losses['copying'])} | "
            f"{mean_and_spread(losses['corpus'])} | {_beside_exact(runs, kind, seeds)} |"
        )
    table = "\n".join(rows)
    steps = {task: words[0].partition("=")[2] for task, words in _TASKS.items()}
    window = ATTENTIONS["longformer"].sizes["window"]
    first = ATTENTIONS["longformer"].sizes["global"]
    means = ATTENTIONS["linformer"].sizes
    paper = "[arXiv 1511.06464](https://arxiv.org/abs/1511.06464)"
    return f"""# How well each kind of attention learns

Decoders of two layers of 64, about 0.1M parameters without the vocabulary; LSTM and GRU have cells
of {RECURRENT["lstm"]} and {RECURRENT["gru"]}, for as many. All see the same tokens with the same
peak learning rate ({rate:g}); nothing was tuned for any of them, and sizes of attention are the
defaults. {seeds} seeds, means and standard deviations of held-out losses in nats per token;
{versions()}.

*Copying* ({paper}): {REPEATED} symbols out of
{SYMBOLS}, blanks, and the same symbols again, each {DISTANCE} tokens after itself. The loss is that
of the repeated symbols and of their end after {steps["copying"]} steps of 4 samples; a model that
knows when they come, but not which, has {GUESSED:.2f}. *Corpus*: Python's own library,
{steps["corpus"]} steps of 2 samples of {SEQ_LEN["corpus"]:,} tokens, early in training.
The last column is the difference from exact attention, seed by seed; differences within its spread
say nothing.

| `model.attention` | sizes | copying | corpus | beside `{EXACT}` |
|---|---|---|---|---|
{table}

![Held-out loss over steps, of both tasks](learning.svg)

Two layers of `longformer` reach {2 * (window - 1)} tokens back, and a document's first {first}:
copying at {DISTANCE} lies beyond them, by construction, but for the symbols that are global. A
larger window or more global tokens would reach them. `linformer` sees means of
{means["window"] // means["features"]} tokens at that distance. [What each kind
sees](long_sequences.md).

Written by `tools/proofs/compare_attention.py`.
"""


def _sizes(kind: str) -> str:
    if kind in RECURRENT:
        return f"cell {RECURRENT[kind]}"
    return ", ".join(f"{name} {size}" for name, size in ATTENTIONS[kind].sizes.items()) or "exact"


def _beside_exact(runs: dict[tuple[str, str, int], RunFolder], kind: str, seeds: int) -> str:
    apart = [
        _last(runs["corpus", kind, seed]) - _last(runs["corpus", EXACT, seed])
        for seed in range(seeds)
    ]
    return (
        "" if kind == EXACT else f"{statistics.fmean(apart):+.4f} ± {statistics.stdev(apart):.4f}"
    )


def draw(runs: dict[tuple[str, str, int], RunFolder], seeds: int, path: Path) -> None:
    """Draw the held-out loss of both tasks over steps, one line a seed."""
    figure = new_figure(
        9.6, 4, "Kinds of attention, LSTM and GRU", "held-out loss: median and range of the seeds"
    )
    titles = {"copying": f"copying at a distance of {DISTANCE}", "corpus": "Python's library"}
    axes = figure.subplots(1, 2)
    for axis, (task, title) in zip(axes, titles.items(), strict=True):
        for place, kind in enumerate((*KINDS, *RECURRENT)):
            curves = [lines_with(runs[task, kind, seed], "eval_loss")[1:] for seed in range(seeds)]
            steps = [line["step"] for line in curves[0]]
            losses = [[line["eval_loss"] for line in at] for at in zip(*curves, strict=True)]
            colour = f"C{place}"
            axis.plot(steps, [statistics.median(each) for each in losses], color=colour, label=kind)
            lowest, highest = ([end(each) for each in losses] for end in (min, max))
            axis.fill_between(steps, lowest, highest, color=colour, alpha=0.15, lw=0)
        axis.set_title(title)
        axis.set_xlabel("step")
    axes[0].set_ylabel("nats per token")
    axes[0].axhline(GUESSED, color="C7", lw=0.8, ls=":")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    write_plot(path, figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
