"""Runs cells under the simulator, each a group of ranks forked from one process."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from harness.launch.fork_server import Zygote
from harness.plan.machine import libaio_problems
from tools.proofs.models import LEARNED
from tools.proofs.streams.cells import MEASURED, STEPS, Cell
from tools.proofs.streams.worker import Job, Seen

LIMIT_S = 1800.0
VOCAB_SIZE = 512
_WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905


def prepare(folder: Path) -> None:
    """Write the models and the text that all cells read."""
    for name in ("llama", "mixtral"):
        (folder / name).mkdir(exist_ok=True)
        config = {**LEARNED[name], "vocab_size": VOCAB_SIZE}
        (folder / name / "config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    texts = [" ".join(draw.choices(_WORDS, k=draw.randrange(5, 60))) for _ in range(400)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    _write_weights(folder / "llama", folder / "llama_weights", folder / "text.jsonl")


def _write_weights(model: Path, folder: Path, corpus: Path) -> None:
    """Write a model with weights and tokenizer: those that adapters are trained beside."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness.data.corpus import find_corpus
    from harness.data.tokenizer import train_tokenizer

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    made.to(torch.bfloat16).save_pretrained(folder)
    train_tokenizer(find_corpus(str(corpus)), folder, VOCAB_SIZE)


def impossible(cell: Cell) -> str:
    """Return the reason why a cell cannot run on this machine; "" if it can."""
    return "; ".join(libaio_problems()) if cell.needs_libaio else ""


class Failed(Exception):
    """A run did not end with code 0; with its output."""


def seen(zygote: Zygote, cell: Cell, folder: Path, synchronizes: bool = True) -> list[Seen]:
    """Run a cell, unless `folder` holds its results; return what each rank saw.

    Raises Failed.
    """
    out = folder / (cell.name if synchronizes else f"{cell.name}-control")
    results = [Path(f"{out}.{rank}.json") for rank in range(cell.ranks)]
    if all(path.exists() for path in results):
        return [Seen.read(path) for path in results]
    run_dir = f"run.dir={out}-run"
    shutil.rmtree(f"{out}-run", ignore_errors=True)  # of a run that was ended
    # Twice the steps: the same place between saves, evaluations and looks is measured.
    for before in (0, STEPS) if cell.resumes else (0,):
        arguments = [*cell.command(folder, before + STEPS), run_dir]
        measured = before + MEASURED
        job = Job(arguments, measured, cell.discards, synchronizes, str(out))
        ended = zygote.run(
            [str(job.write())],
            folder / f"{out.name}-logs",
            ranks=cell.ranks,
            limit_s=LIMIT_S,
            main="tools.proofs.streams.worker",
            patience_s=30.0,
        )
        if any(code != 0 for code in ended.codes):  # None: it was ended at its limit
            raise Failed(f"{cell.name} ended with {ended.codes}\n{ended.output}")
    shutil.rmtree(f"{out}-run")
    return [Seen.read(path) for path in results]
