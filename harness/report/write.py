"""Writes the page of a run into its folder: `python -m harness.report.write RUN`.

A training run starts this as a separate process (run/pages.py): a defect, a full disk or a slow one
then costs it a page and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from harness.report.page import page_of
from harness.report.run_record import read

NAME = "report.html"


def write_page(path: Path, page: str) -> None:
    """Replace a page: a reader sees the old one or the new one, whole. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def main(run: str) -> int:
    """Write runs/NAME/report.html."""
    folder = Path(run)
    try:
        write_page(folder / NAME, page_of(read(folder)))
    except OSError as error:
        print(f"{folder / NAME} cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(10)  # a page can wait, a rank cannot
    sys.exit(main(sys.argv[1]))
