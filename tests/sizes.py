"""Lines and files of every folder, compared with those committed in sizes.toml.

    python -m tests.sizes            # exit code 1 if a folder has grown by more than 3 %
    python -m tests.sizes --write    # replace the committed numbers

The new numbers are committed with the change that needs them.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_name("sizes.toml")
MOST_GROWTH = 1.03
# Target lines and files.
GOALS = {
    "harness": (31_000, 180),
    "tools": (12_500, 95),
    "tests": (33_000, 200),
    "docs": (3_500, 22),
}


def sizes(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Return lines and files of each folder, of Python and, in docs/, of Markdown. Counted are the
    folders of harness/ and tools/, the files beside these folders, and tests/ and docs/ as a whole.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "harness/*.py", "tools/*.py", "tests/*.py", "docs/*.md"],
        cwd=root, capture_output=True, check=True, text=True,
    )  # fmt: skip
    lines, files = Counter[str](), Counter[str]()
    for name in filter(None, listed.stdout.split("\0")):
        parts = Path(name).parts
        folder = "/".join(parts[:2]) if parts[0] in ("harness", "tools") and parts[2:] else parts[0]
        if (root / name).is_file():
            lines[folder] += len((root / name).read_text(encoding="utf-8").splitlines())
            files[folder] += 1
    return {folder: (lines[folder], files[folder]) for folder in sorted(lines)}


def grown(now: dict[str, tuple[int, int]], kept: dict[str, list[int]]) -> list[str]:
    """Return the folders that are new or exceed their committed lines by more than 3 %."""
    return [
        f"{folder}: {lines:,} lines, committed are {kept.get(folder, [0])[0]:,}"
        for folder, (lines, _) in now.items()
        if lines > MOST_GROWTH * kept.get(folder, [0])[0]
    ]


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a folder has grown."""
    now = sizes()
    if "--write" in argv:
        KEPT.write_text("".join(f'"{folder}" = [{a}, {b}]\n' for folder, (a, b) in now.items()))
    print(f"{'':10} {'lines':>8} {'files':>6} {'goal':>8} {'files':>6}")
    for area, (most_lines, most_files) in GOALS.items():
        within = [size for folder, size in now.items() if folder.split("/")[0] == area]
        lines, files = (sum(column) for column in zip(*within, strict=True))
        print(f"{area:10} {lines:8,} {files:6,} {most_lines:8,} {most_files:6,}")
    problems = grown(now, tomllib.loads(KEPT.read_text()))
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
