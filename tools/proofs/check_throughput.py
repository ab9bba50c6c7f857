"""Hold estimated times against published ones.

    python tools/proofs/check_throughput.py
    python tools/proofs/check_throughput.py --markdown docs/time_accuracy.md

Prints a line for each source, and the errors of the rows that no constant was fitted to. Exit code
1 if their median is above 10 % or their 90th percentile above 25 %.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.proofs.throughput.report import compared, markdown, quantile, summary
from tools.proofs.throughput.rows import SOURCES, published

MEDIAN, NINETY = 0.10, 0.25


def main() -> int:
    """Command line -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    args = parser.parse_args()
    results = compared(published())
    for source in SOURCES:
        errors = [each.error for each in results if each.row.source == source]
        print(f"{source:<24}{len(errors):4} rows, median error {quantile(errors, 0.5):6.1%}")
    print(*(summary(results, part) for part in ("fitted", "judged", "other")), sep="\n")
    if args.markdown:
        args.markdown.write_text(markdown(results))
    judged = [each.error for each in results if each.row.part == "judged"]
    return int(quantile(judged, 0.5) > MEDIAN or quantile(judged, 0.9) > NINETY)


if __name__ == "__main__":
    sys.exit(main())
