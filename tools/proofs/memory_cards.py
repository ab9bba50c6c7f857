"""Published memory of GPUs beside the estimate: docs/memory_cards.md.

    python tools/proofs/memory_cards.py --markdown docs/memory_cards.md

Each run of tools/proofs/cards/published.toml is planned as train.py would plan it. Exit code 1 if
more was published than the interval allows for, or if a run that did not fit was said to fit;
figures in doubt do not count.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.proofs.cards.report import is_kept, line, markdown, summaries
from tools.proofs.cards.runs import carded, published


def main(argv: list[str]) -> int:
    """argv -> a line per run on standard output, perhaps a table -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    args = parser.parse_args(argv)
    cards = [carded(row) for row in published()]
    for card in cards:
        print(line(card))
    print(summaries(cards))
    if args.markdown:
        args.markdown.write_text(markdown(cards), encoding="utf-8")
    return 0 if is_kept(cards) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
