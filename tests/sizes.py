"""The budget: lines of every room, held below the ceilings of sizes.toml.

    python -m tests.sizes            # exit code 1 if a room, or their sum, is above its ceiling
    python -m tests.sizes --lower    # lower the ceilings to what the rooms need now

A room's ceiling is raised by hand, in a commit that says what for; the sum's never.
"""

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_name("sizes.toml")
SUM = "harness, tools and tests"


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of each room, and their sum. Rooms are the folders of harness/ and tools/,
    the files beside these folders, and tests/ as a whole; docs/, of Markdown, is not in the sum.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "harness/*.py", "tools/*.py", "tests/*.py", "docs/*.md"],
        cwd=root, capture_output=True, check=True, text=True,
    )  # fmt: skip
    lines = Counter[str]()
    for name in filter(None, listed.stdout.split("\0")):
        parts = Path(name).parts
        room = "/".join(parts[:2]) if parts[0] in ("harness", "tools") and parts[2:] else parts[0]
        if (root / name).is_file():
            lines[room] += len((root / name).read_text(encoding="utf-8").splitlines())
    rooms = {room: lines[room] for room in sorted(lines)}
    return rooms | {SUM: lines.total() - lines["docs"]}


def above(now: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """Return a line for each room that is above its ceiling, or has none."""
    return [
        f"{room}: {lines:,} lines, at most {ceilings.get(room, 0):,}"
        for room, lines in now.items()
        if lines > ceilings.get(room, 0)
    ]


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a room or the sum is above its ceiling."""
    now, ceilings = sizes(), tomllib.loads(CEILINGS.read_text())
    if "--lower" in argv:
        ceilings = {
            room: min(ceilings.get(room, sys.maxsize), -(-now[room] // 50) * 50) for room in now
        }
        ceilings[SUM] = tomllib.loads(CEILINGS.read_text())[SUM]
        CEILINGS.write_text("".join(f'"{room}" = {most}\n' for room, most in ceilings.items()))
    print(*(f"{room:26} {now[room]:8,} of {ceilings.get(room, 0):8,}" for room in now), sep="\n")
    problems = above(now, ceilings)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
