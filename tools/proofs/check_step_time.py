"""Do steps on this machine take as long as the planner says? Real engines on CPU ranks.

    python tools/proofs/check_step_time.py --out FOLDER                  # resumes
    python tools/proofs/check_step_time.py --out FOLDER --rounds 3 --markdown PAGE

Times 14 layouts to which this machine's rates are fitted, as by tools/plan_cluster.py --calibrate,
and 25 others with which the estimates are compared. The quickest of a layout's steps counts: other
processes make steps slower, never quicker. Exit code 1 if the median error of the others is above
10 %, or Kendall's tau of their ranking below 0.8.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.cluster.calibrate import fitted
from tools.proofs.jobs import Group, run_jobs
from tools.proofs.step_times.cases import FITTED, JUDGED, Case
from tools.proofs.step_times.report import Timed, markdown, median_error, run_of, tau

MEDIAN, TAU = 0.10, 0.8


def main() -> int:
    """Command line -> exit code."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        measure([*FITTED, *JUDGED], out, args.rounds)
        site = fitted([run_of(case, out) for case in FITTED], len(os.sched_getaffinity(0)))
        rows = [Timed(case, run_of(case, out), site) for case in JUDGED]
        site.write(out / "site.json")
    for row in rows:
        print(f"{row.case.name:52} {row.seconds:7.3f} s, predicted {row.error:+.1%}")
    print(
        f"{len(rows)} layouts: median error {median_error(rows):.1%}, Kendall's tau "
        f"{tau(rows):.2f}; the {site.runs} that rates were fitted to: {site.median_error:.1%}; "
        f"load {os.getloadavg()[1]:.1f} on {site.cores} cores"
    )
    if args.markdown:
        args.markdown.write_text(markdown(rows, site), encoding="utf-8")
    return int(median_error(rows) > MEDIAN or tau(rows) < TAU)


def measure(cases: Sequence[Case], out: Path, rounds: int) -> None:
    """Time every case in so many rounds, each in a folder of its own, which is resumed."""
    for number in range(rounds):
        folder = out / f"round{number}"
        folder.mkdir(parents=True, exist_ok=True)
        missing = [case for case in cases if not (folder / f"{case.name}.json").exists()]
        run_jobs("step_times", missing, folder, _group)


def _group(case: Case) -> Group:
    """DeepSpeed keeps what it knows of divided tensors in globals."""
    return Group(int(case.tensor > 1), case.ranks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep times here, to resume")
    parser.add_argument("--rounds", type=int, default=1, help="times that all are timed (1)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
