"""Proofs of clean_data.py and tokenize_data.py: recall, counts, rates beside the libraries' own.

    python tools/proofs/benchmark_cleaning.py --markdown docs/cleaning_proof.md

Recall is counted on planted duplicates and personal data. Counts and output are compared with a
pipeline of bare datatrove blocks (its reader, its executor) on the same files; rates with that, and
with the tokenizer's own batches on all cores, in alternating runs of processes of their own. Rates
are bytes of text for each second, and for each second of CPU time, which other work disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.made_with import machine
from tools.proofs.cleaning.jobs import JOBS
from tools.proofs.cleaning.planted import write_corpus
from tools.proofs.cleaning.tables import counts, rates, recall

COPIES = 8
"""Of the cleaned corpus, for the rate of tokenising."""


def main(argv: list[str]) -> int:
    """argv -> tables -> exit code: 1 if a requirement does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs; 1: no rates")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        job, folder, out = args.child
        JOBS[job](Path(folder), Path(out))
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tables = [*_tables(folder, args.rounds)]
    text = (
        _HEAD.format(machine=machine(), load=load, rounds=args.rounds) + "\n\n".join(tables) + "\n"
    )
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return int("**no**" in text)


_HEAD = """\
# Cleaning and tokenising, checked

Made by `python tools/proofs/benchmark_cleaning.py --rounds {rounds} --markdown FILE` on
{machine}; load {load:.1f} at the start (more than the cores: other work ran beside it).

"""

_OF_A_START = """\
A tool's rate, not a start's: N processes each read, tokenise and write shards of their own.
What a run does by itself at its first start, in one process, is slower: [0.85 of the
tokenizer's rate](overhead.md)."""


def _tables(folder: Path, rounds: int) -> Iterator[str]:
    yield recall(folder / "recall")
    data = folder / "data"
    write_corpus(data)
    runs: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds):
        for job in ("tool", "bare"):
            runs.setdefault(job, []).append(_child(job, data, folder / f"{job}-{turn}"))
    yield counts(folder / "tool-0", folder / "bare-0")
    if rounds < 2:
        return
    yield rates("Cleaning", 1, "clean_data.py", "bare datatrove", runs["tool"], runs["bare"])
    _child("train", data, folder / "tokenizer")
    more = _copies(data, folder / "more")
    for turn in range(rounds):
        for job in ("tokenize", "encode"):
            out = folder / f"{job}-{turn}"
            runs.setdefault(job, []).append(_child(job, more, out))
    yield rates(
        *("Tokenising", COPIES, "tokenize_data.py", "the tokenizer's own batches"),
        *(runs["tokenize"], runs["encode"]),
    )
    yield _OF_A_START


def _copies(data: Path, folder: Path) -> Path:
    """Return a folder with the files of another, each several times: many shards for each core."""
    folder.mkdir()
    for file in data.iterdir():
        for copy in range(COPIES):
            os.link(file, folder / f"{copy}-{file.name}")
    return folder


def _child(job: str, folder: Path, out: Path) -> dict[str, float]:
    """Run a job in a process of its own; return its seconds and CPU seconds."""
    command = [sys.executable, str(Path(__file__)), "--child", job, str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
