"""Runs cells under the simulator, and the conditions that they must meet."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.launch.fork_server import Zygote
from harness.plan.machine import libaio_problems
from tests.gates.models import LEARNED
from tests.gates.streams.cells import MEASURED, STEPS, Cell
from tests.gates.streams.worker import Job, Seen, Wait

HOT = ("data", "micro-batches", "step", "log", "verdict")  # the phases of every step
# The harness's waits beside the log line: (phase, file) -> why no step can do without.
DECIDES = {
    ("micro-batches", "harness/engine/expert.py"): (
        "divided experts: a rank has to know how many tokens the others send before it can make "
        "room for them, once for each layer and pass"
    ),
    ("step", "harness/engine/skip.py"): (
        "fp32 at stage 0: DeepSpeed's optimizer there steps with NaN as with anything, so that the "
        "norm is read before the step; the others of DeepSpeed read theirs"
    ),
    ("step", "harness/run/run.py"): (
        "guard.spikes=skip or rollback: loss and norm decide if the step is taken, and have to be "
        "known before it; DeepSpeed then reads its own norm at once"
    ),
}
LOGS = ("log", "harness/run/meter.py")  # once for each line of metrics


@dataclass(frozen=True)
class Row:
    """A cell and what its ranks saw."""

    cell: Cell
    ranks: list[Seen] = field(default_factory=list)
    skipped: str = ""
    """Why this machine cannot run it."""
    failure: str = ""
    """How the run failed."""

    @property
    def races(self) -> Counter[str]:
        """Conflicting accesses without an order, over all ranks, by their two places."""
        return sum((Counter(seen.races) for seen in self.ranks), Counter())

    @property
    def reuses(self) -> Counter[str]:
        """Blocks that another stream could still use when they were freed, by two places."""
        return sum((Counter(seen.reuses) for seen in self.ranks), Counter())

    @property
    def problems(self) -> list[str]:
        """Return the conditions that are not met."""
        problems = [self.failure] if self.failure else []
        problems += [f"race: {race}" for race in self.races]
        problems += [f"reused too early: {reuse}" for reuse in self.reuses]
        problems += [text for seen in self.ranks for text in _own_waits(seen.waits)]
        return sorted(set(problems))


def hot(waits: Iterable[Wait], *phases: str) -> list[Wait]:
    """Return the waits of these phases of a step, or of all of them."""
    return [wait for wait in waits if wait.phase in (phases or HOT)]


def _own_waits(waits: list[Wait]) -> list[str]:
    """Return the harness's waits in a step that should not be."""
    own = [wait for wait in hot(waits) if wait.place.startswith("harness/")]
    counts: Counter[tuple[str, str]] = Counter()
    for wait in own:
        counts[wait.phase, wait.place.partition(":")[0]] += wait.count
    return [
        f"the harness waits {count} times in {phase}: {file}"
        for (phase, file), count in counts.items()
        if not ((phase, file) in DECIDES and phase == "micro-batches")
        and count > ((phase, file) in (*DECIDES, LOGS))
    ]


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
            main="tests.gates.streams.worker",
            patience_s=30.0,
        )
        if any(code != 0 for code in ended.codes):  # None: it was ended at its limit
            raise Failed(f"{cell.name} ended with {ended.codes}\n{ended.output}")
    shutil.rmtree(f"{out}-run")
    return [Seen.read(path) for path in results]
