"""Measure how a corpus of 10 million documents opens, begins and resumes.

    python tools/proofs/measure_data_scale.py --folder /tmp/scale --write docs/data_scale.md
    python tools/proofs/measure_data_scale.py --documents 100000 --folder /tmp/small
    python tools/proofs/measure_data_scale.py --times 21 --only packed --folder /tmp/large  # 102 GB

The tokens are made, the same on every machine. Every opening is that of a new process, once with
the files out of the page cache and once more. Megatron-LM's reader is measured if megatron-core is
found (PYTHONPATH), datatrove's if datatrove is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.proofs.data_scale.corpus import make_corpus
from tools.proofs.data_scale.page import page
from tools.proofs.data_scale.readers import BUILDS, CASES

WORKER = "tools.proofs.data_scale.worker"


def main(argv: list[str]) -> int:
    """argv -> measurements -> page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument(
        "--times", type=int, default=1, help="longer documents, of a hole in a file"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for 13 GB of files")
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--add", type=Path, help="lines that an earlier call printed")
    parser.add_argument("--write", type=Path, help="page to write")
    arguments = parser.parse_args(argv)
    corpus = make_corpus(arguments.folder, arguments.documents, arguments.times)
    results = []
    for case in arguments.only:
        for state in ("build", "cold", "warm") if case in BUILDS else ("cold", "warm"):
            command = [sys.executable, "-m", WORKER, str(arguments.folder), case, state]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            if arguments.times > 1:
                results[-1]["case"] += f", {corpus.bin_bytes / 1e9:.0f} GB"
            print(json.dumps(results[-1]), flush=True)
    if arguments.add:
        results = [json.loads(line) for line in arguments.add.read_text().splitlines()] + results
    text = page(corpus, results)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
