"""Train state-space and hybrid families in real runs, resume in another layout, and export.

    python -m tests.gates.train_families --out build/hybrids --markdown docs/families.md

For each family of hybrids.py: two steps of ZeRO 1 on two CPU ranks and two more of ZeRO 3 from its
checkpoint, against four uninterrupted steps of ZeRO 1; the export's held-out loss by plain
transformers, against the run's; and a step in every layout that divides a model, whose loss and
gradient norm must equal the undivided ones, or the reason why there is none. Rows kept in
--out are not run again. Exit code 0, or 1 if a family gives neither a result nor a reason.
"""

import argparse
import ast
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.errors import ExitCode
from harness.files.corpus import find_corpus
from harness.launch.fork_server import Zygote
from harness.runfolder import RunFolder
from harness.terminal import HelpFormatter
from tests.gates.hybrids import HYBRIDS, NEWER
from tests.tables import beside

TOLERANCE = 1e-5
"""For losses that differ only in the order of sums."""
DIVIDED = {
    "stages": "ds.pipeline.stages=2",
    "tensors": "ds.tensor_parallel.autotp_size=2",
    "sequences": "ds.sequence_parallel_size=2",
}
_COLUMNS = ("family", "trained", "resumed", "exported", "memory", *DIVIDED)
_NEWER_COLUMNS = ("family", "trained", "memory", "tensors")
_SET = r"^[\w.]+( is |=)2( \(command line\))?[:,] (model\.name=\S+: )?"
"""The beginning of a reason, which is the same in all rows."""
_TABLES = beside(__file__, "families.toml")
_WORDS: list[str] = _TABLES["words"]
_HELD_OUT_SAMPLES = 8  # eval.samples


def main(argv: list[str]) -> int:
    """Run the command: argv -> a line per family, optional table -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("families", nargs="*", default=[*HYBRIDS, *NEWER])
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = args.out / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus, 300)
    with Zygote() as zygote:
        rows = [kept_row(zygote, name, args.out.absolute()) for name in args.families]
    if args.markdown:
        args.markdown.write_text(markdown(rows), encoding="utf-8")
    return 0 if all(map(is_settled, rows)) else 1


def write_corpus(path: Path, count: int) -> None:
    """Write functions of Python's library as a corpus: many short documents, a few long."""
    lines = (json.dumps({"text": text}) for text in itertools.islice(_functions(), count))
    path.write_text("\n".join(lines))


def _functions() -> Iterator[str]:
    for piece in find_corpus(None).pieces():
        try:
            tree = ast.parse(piece.text)
        except (SyntaxError, ValueError):
            continue
        lines = piece.text.splitlines(keepends=True)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of the rows, with the names of families without a row."""
    missing = [n for n in (*HYBRIDS, *NEWER) if n not in {row["family"] for row in rows}]
    rest = f"\nWithout a row, not run for this page: {', '.join(missing)}.\n" if missing else ""
    page = [_line(row, _COLUMNS) for row in rows if row["family"] in HYBRIDS]
    newer = [_line(row, _NEWER_COLUMNS) for row in rows if row["family"] in NEWER]
    return "".join((_TABLES["head"], *page, _TABLES["newer_head"], *newer, rest))


def kept_row(zygote: Zygote, family: str, folder: Path) -> dict[str, Any]:
    """Return the row kept in the folder, or run the family and keep its row there."""
    path = folder / f"{family}.json"
    if path.exists():
        row: dict[str, Any] = json.loads(path.read_text())
    else:
        row = Runs(zygote, {**HYBRIDS, **NEWER}[family], folder / family).row()
        path.write_text(json.dumps(row))
    print(json.dumps(row), flush=True)
    return row


def is_settled(row: dict[str, Any]) -> bool:
    """Return whether each cell is a yes or a reason, rather than a crash or a difference."""
    return not any("crashed" in str(cell) or "differs" in str(cell) for cell in row.values())


class Runs:
    """The runs of one family."""

    def __init__(self, zygote: Zygote, config: dict[str, Any], folder: Path) -> None:
        self._zygote, self._folder = zygote, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._family = config["model_type"]
        (folder / "config.json").write_text(json.dumps(config))

    def row(self) -> dict[str, Any]:
        """Return the family's results; a reason in place of "yes" if something is not supported."""
        row = {"family": self._family, "trained": self.run("resumed", 1, "train.steps=2")}
        if row["trained"] != "yes":
            return row
        row["memory"] = self._memory()
        if self._family in HYBRIDS:
            row["resumed"], row["exported"] = self._resumed(), self.exported()
        for name, word in DIVIDED.items():
            if name in (_COLUMNS if self._family in HYBRIDS else _NEWER_COLUMNS):
                row[name] = self.run(name, 1, "train.steps=1", word)
        return row

    def run(self, name: str, stage: int, *words: str) -> str:
        """Return "yes" if a run on two ranks succeeds, otherwise the reason."""
        logs = self._folder / f"{name}-logs"
        arguments = [
            *(*_WORDS, f"model.name={self._folder}", f"run.dir={self._folder / name}", *words),
            *(f"ds.zero_optimization.stage={stage}", f"data.path={self._corpus}"),
            f"data.cache_dir={self._folder.parent / 'cache'}",
        ]
        ended = self._zygote.run(arguments, logs, limit_s=600)
        if ended.codes == [0, 0]:
            return "yes"
        if {*ended.codes} == {int(ExitCode.BAD_CONFIG)}:
            return _reason(ended.outputs)
        return f"crashed: {ended.codes}, see {logs}"

    @property
    def _corpus(self) -> Path:
        return self._folder.parent / "corpus.jsonl"

    def _memory(self) -> str:
        plan = json.loads(RunFolder(self._folder / "resumed").plan_path.read_text())
        return "unknown" if plan["estimate"] is None else "traced"

    def _resumed(self) -> str:
        resumed = self.run("resumed", 3, "train.steps=4")
        whole = self.run("whole", 1, "train.steps=4", "save.export=false")
        if {resumed, whole} != {"yes"}:
            return whole if resumed == "yes" else resumed
        return _compared(self._learned("resumed"), self._learned("whole"))

    def _learned(self, name: str) -> list[float]:
        lines = RunFolder(self._folder / name).read_metrics()
        names = ("loss", "grad_norm", "eval_loss")
        return [line[name] for line in lines for name in names if line.get(name) is not None]

    def exported(self) -> str:
        """Compare the export's held-out loss, by plain transformers, with the run's."""
        run = RunFolder(self._folder / "resumed")
        return _compared([plain_loss(run)], [[*run.read_metrics()][-1]["eval_loss"]])


def plain_loss(run: RunFolder) -> float:
    """Return the held-out loss of a run's export in nats, computed only by transformers."""
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    from harness.checkpoint.compatibility import recorded_run
    from harness.data.build import build_data
    from harness.data.spec import DataSpec

    plan = json.loads(run.plan_path.read_text())
    spec = DataSpec.of_run(recorded_run(plan["run"]), plan["model_config"])
    batch = build_data(spec).held_out.batch(0, _HELD_OUT_SAMPLES)
    model = AutoModelForCausalLM.from_pretrained(run.export_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    return float(functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()))


def _compared(values: Sequence[float], expected: Sequence[float]) -> str:
    alike = len(values) == len(expected) and all(
        math.isclose(value, other, rel_tol=TOLERANCE)
        for value, other in zip(values, expected, strict=True)
    )
    return "yes" if alike else f"differs: {values} and {expected}"


def _reason(outputs: Sequence[str]) -> str:
    """Return the first problem that a run reports."""
    text = "\n".join(outputs)
    return next(iter(re.findall(r"cannot train: (.*)", text)), text)


def _line(row: dict[str, Any], columns: Sequence[str]) -> str:
    cells = (str(row.get(column, "")) for column in columns)
    return f"| {' | '.join(re.sub(_SET, '', cell) for cell in cells)} |\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
