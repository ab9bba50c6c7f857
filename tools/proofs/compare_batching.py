"""Compare the batchings of a corpus of skewed lengths: padding, speed and learning curves.

    python tools/proofs/compare_batching.py --folder /tmp/batching --write docs/batching.md

The corpus is the functions and classes of Python's own library. Every way to batch reads every
document equally often, with about equally many tokens in a step, over several seeds. The held-out
loss is that of the same documents, each seen alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from harness.runfolder import RunFolder
from tools.figure import new_figure, write_plot
from tools.proofs.small_runs import functions, lines_with, mean_and_spread, trained, write_jsonl
from tools.proofs.zygote import Zygote

SEQ_LEN, DOCUMENTS, EVERY, TIMED_STEPS = 256, 2000, 12, 24
_COMMON = (
    *(f"data.seq_len={SEQ_LEN}", "data.held_out=0.03", "eval.samples=1000000"),
    *("train.epochs=1", "optim.lr=4e-3", "optim.warmup_steps=10", f"eval.every={EVERY}"),
)
# 19 packed samples hold about as many tokens as 32 documents: an epoch has as many steps.
_PACKED = ("train.global_batch=19", "train.micro_batch=19")
_ALONE = ("train.global_batch=32", "train.micro_batch=8")
WAYS: dict[str, tuple[str, ...]] = {
    "packed": (*_PACKED, "data.packing=whole", "data.document_mask=true"),
    "padded": (*_ALONE, "data.batching=padded"),
    "length_grouped": (*_ALONE, "data.batching=length_grouped"),
    "token_budget": (
        *("train.global_batch=32", "data.batching=token_budget"),
        f"data.tokens_per_batch={8 * SEQ_LEN}",
    ),
}


def main(argv: list[str]) -> int:
    """argv -> runs -> page and picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="runs, which go on there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--write", type=Path, help="page to write, with a picture beside it")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    texts = [*functions()]
    texts = texts[:: max(1, len(texts) // arguments.documents)][: arguments.documents]
    corpus = write_jsonl(arguments.folder / "functions.jsonl", texts)
    words = (*_COMMON, f"data.path={corpus}", f"data.cache_dir={arguments.folder / 'cache'}")
    runs: dict[str, list[RunFolder]] = {way: [] for way in WAYS}
    with Zygote() as zygote:
        for seed in range(arguments.seeds):
            for way, own in WAYS.items():
                folder = arguments.folder / f"{way}-{seed}"
                run = trained(zygote, folder, [*words, *own, f"train.seed={seed}"])
                runs[way].append(run)
                print(way, seed, lines_with(run, "eval_loss")[-1]["eval_loss"], flush=True)
        timed = {way: _timed(zygote, arguments.folder, way, words) for way in WAYS}
    text = page(runs, timed, len(texts))
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
        draw(runs, arguments.write.with_suffix(".svg"))
    return 0


def _timed(zygote: Zygote, folder: Path, way: str, words: tuple[str, ...]) -> RunFolder:
    """Return a short run without evaluations, soon after those of the other ways."""
    short = [word for word in words if not word.startswith(("train.epochs", "eval."))]
    short += [f"train.steps={TIMED_STEPS}", "eval.every=0", "eval.samples=8"]
    return trained(zygote, folder / f"timed-{way}", [*short, *WAYS[way]])


def page(runs: dict[str, list[RunFolder]], timed: dict[str, RunFolder], documents: int) -> str:
    """Return the table of all ways, as a page."""
    rows = []
    for way, of_way in runs.items():
        lines = lines_with(timed[way], "loss")
        padding = [_padding(run, way) for run in of_way]
        rates = [line["tokens_per_s"] * (1 - _counted(way) * padding[0]) for line in lines]
        steps = [run.read_metrics()[-1]["step"] for run in of_way]
        times = [line["step_time_s"] for line in lines]
        wait = statistics.fmean(line["data_wait_share"] for line in lines)
        losses = [lines_with(run, "eval_loss")[-1]["eval_loss"] for run in of_way]
        rows.append(
            f"| `{way}` | {statistics.fmean(padding):.1%} | {steps[0]} | "
            f"{1 / statistics.median(times):.2f} | {statistics.median(rates):,.0f} | {wait:.1%} | "
            f"{mean_and_spread(losses)} |"
        )
    seeds = len(next(iter(runs.values())))
    table = "\n".join(rows)
    return f"""# Batches by length, measured

{documents:,} functions and classes of Python's library, `data.seq_len={SEQ_LEN}`, one epoch,
{seeds} seeds of a model of 0.2M parameters on one CPU core. `packed` is `data.packing=whole` with
`data.document_mask=true`; held-out documents are scored alone in all of them. What a step reads is
described in [data](data.md#batches-by-length).

| `data.batching` | padding | steps | steps/s | tokens/s* | wait for data | held-out loss |
|---|---|---|---|---|---|---|
{table}

![Held-out loss over tokens](batching.svg)

\\* without padding. Steps/s and tokens/s are medians over {TIMED_STEPS} steps of runs one after
the other, on a machine that others use, of a model so small that a micro-batch costs nearly as much
as its positions. The losses are those at the end, means and standard deviations over seeds, early
in training: `length_grouped` and `token_budget` compare with `padded`, whose documents come
in random order; `packed` divides an epoch into other steps: its batch is 19 samples, chosen
so that it takes as many. (An earlier measurement of the same corpus, model and seeds with 16
samples a step, 72 steps, ended at 4.606 ± 0.043.) Three short seeds do not prove curves equal.
Written by
`tools/proofs/compare_batching.py`.
"""


def _counted(way: str) -> bool:
    """Return whether a way's tokens count its padding."""
    return way == "packed"


def _padding(run: RunFolder, way: str) -> float:
    """Return the share of a run's positions that hold no token."""
    if not _counted(way):
        return statistics.fmean(line["padding_share"] for line in lines_with(run, "padding_share"))
    (packed,) = (
        event
        for event in run.read_events()
        if event["kind"] == "packed_whole" and event["side"] == "train"
    )
    return float(packed["padding"] / packed["samples"] / SEQ_LEN)


def draw(runs: dict[str, list[RunFolder]], path: Path) -> None:
    """Draw the held-out loss of every run over its share of the epoch."""
    figure = new_figure(7.2, 3.6, "Held-out loss, the same documents", "one curve a seed")
    axis = figure.subplots()
    for place, (way, of_way) in enumerate(runs.items()):
        for number, run in enumerate(of_way):
            lines = lines_with(run, "eval_loss")[1:]
            end = lines[-1]["step"]
            xs, ys = (
                [100 * line["step"] / end for line in lines],
                [line["eval_loss"] for line in lines],
            )
            axis.plot(xs, ys, color=f"C{place}", lw=1.2, label=None if number else way)
    axis.set_xlabel("per cent of the epoch")
    axis.set_ylabel("nats per token")
    axis.legend()
    write_plot(path, figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
