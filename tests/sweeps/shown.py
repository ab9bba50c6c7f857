"""The page of a sweep whose trials never ran, with every state and malicious names."""

from __future__ import annotations

import math
import os
from pathlib import Path

from tools.sweeps.cost import Record, Used
from tools.sweeps.page import write_page
from tools.sweeps.spec import read_sweep

_FILE = """
[sweep]
name = "pages"
trials = 12
[search]
optim.lr = {from = 1e-4, to = 1e-1, log = true}
optim.name = ["adamw", "lion", "sgd"]
train.global_batch = {from = 4, to = 64}
data.path = ["<script>alert(1)</script>", "corpus & more"]
"""


def written(folder: Path) -> Path:
    """Write the page into runs/pages under `folder`; return it."""
    os.chdir(folder)
    Path("pages.toml").write_text(_FILE)
    sweep = read_sweep(Path("pages.toml"), [])
    sweep.folder.mkdir(parents=True)
    choices = [choice for choice in sweep.choices() if choice]
    states = ["done", "pruned", "diverged", "failed", "done", "pruned"] * 2
    records = [
        Record(
            number,
            state,
            choice,
            math.inf if state in ("diverged", "failed") else 3 + 2 * abs(math.sin(number)),
            Used(100 if state == "done" else 30, 1000, 0.1),
            "" if state == "done" else "a reason with <b>tags</b>",
        )
        for number, (choice, state) in enumerate(zip(choices, states, strict=True))
    ]
    for record in records:
        run = sweep.folder_of(record.number)
        run.mkdir()
        lines = [
            f'{{"step": {step}, "eval_loss": {record.value + 5 / step}}}\n'
            for step in range(5, record.used.steps + 1, 5)
            if math.isfinite(record.value)
        ]
        (run / "metrics.jsonl").write_text("".join(lines))
    return write_page(sweep, records).resolve()
