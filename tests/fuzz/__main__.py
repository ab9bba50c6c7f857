"""Thousands of wrong inputs, each tried in a process of its own, and how they ended.

    make fuzz
    make fuzz FUZZ_SEED=7 FUZZ_INPUTS=5000
    make fuzz FUZZ_ONLY=json:17        # this input alone, with everything that it printed

The rule for each: the exit code is in the README's table, no traceback, a bounded time, nothing of
the input is executed, a refused one has written nothing. Exit code 1 where one breaks it, or
cannot be made here; the last lines are a table by kind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
import warnings
from pathlib import Path

from tests.fuzz.base import build_base
from tests.fuzz.fuzzer import Fuzzer, Name, Tried, names, remove
from tests.fuzz.kinds.table import KINDS
from tests.fuzz.report import counted, table, unbalanced
from tests.two_ranks import REPOSITORY, forking

_REPORT_EVERY = 100


def main() -> int:
    """argv -> a table -> exit code."""
    args = _parser().parse_args()
    folder = args.folder.resolve()
    warnings.filterwarnings("ignore", "Duplicate name", module="zipfile")  # on purpose
    remove(folder)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        jobs = 1 if args.only else args.jobs
        (folder / "tmp").mkdir(parents=True)
        zygotes = [forking(TMPDIR=str(folder / "tmp")) for _ in range(jobs)]
        for zygote in zygotes:
            stack.callback(zygote.close)
        fuzzer = Fuzzer(folder, build_base(zygotes[0], folder / "base"), zygotes)
        if args.only:
            return _replayed(fuzzer, args.seed, args.only)
        inputs = names(args.seed, args.inputs, args.kinds)
        results = []
        for result in fuzzer.each(inputs):
            results.append(result)
            if result.faults:
                print(_told(result, fuzzer), flush=True)
            if len(results) % _REPORT_EVERY == 0:
                print(f"{len(results)} of {len(inputs)} inputs", file=sys.stderr, flush=True)
    counts = counted(results)
    problems = unbalanced(counts)
    print(
        *problems,
        f"\nseed {args.seed}, {time.monotonic() - began:.0f} s; inputs by exit code, and faults\n",
        table(counts),
        sep="\n",
    )
    return int(bool(problems) or any(result.faults for result in results))


def _told(result: Tried, fuzzer: Fuzzer) -> str:
    lines = [f"{result.name} ({result.case.note[:100]})"]
    lines += [f"  {fault.kind}: {fault.message[:200]}" for fault in result.faults]
    lines += [f"  {result.name.replay}"]
    return "\n".join(lines).encode("ascii", "backslashreplace").decode()


def _replayed(fuzzer: Fuzzer, seed: int, only: str) -> int:
    kind, _, index = only.partition(":")
    result = fuzzer.one(Name(seed, kind, int(index)))
    command = f"{result.case.main} {shlex.join(result.case.argv)}"
    text = f"{command}\n{result.outcome.output}\ncode {result.code}\n{_told(result, fuzzer)}"
    print(text.encode("ascii", "backslashreplace").decode())
    return int(bool(result.faults))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1500, help="of all kinds together")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], help="default: all")
    parser.add_argument("--only", metavar="KIND:INDEX", help="one input, and all that it prints")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "fuzz")
    return parser


if __name__ == "__main__":
    sys.exit(main())
