"""Does one step, in the process that tools/accept_gpu.py starts for it, and writes its result."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tools.acceptance.bench import ON_CUDA, Bench


def main() -> int:
    """`python -m tools.acceptance.one_step MODULE FOLDER`; writes FOLDER/result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("folder", type=Path, help="of this step; its parent is all steps'")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--accelerator", required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    args = parser.parse_args()
    if args.accelerator == "cuda":
        os.environ |= ON_CUDA
    step = importlib.import_module(args.module)
    bench = Bench(args.folder, args.folder.parent, args.ranks, args.accelerator, args.limit_s)
    with contextlib.closing(bench):
        figure = step.look(bench)
    checks = [asdict(check) for check in bench.checks]
    result = {"figure": figure, "checks": checks, "values": bench.values}
    (args.folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
