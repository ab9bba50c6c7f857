"""Prints how many code lines the library has, and its ten longest files.

python tools/library_size.py

Blank lines, comments and docstrings are free: a limit on them would be a limit on explanation.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Lines of a Python file that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in _NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - _docstring_lines(text))


def _docstring_lines(text: str) -> set[int]:
    """Lines of the strings that stand alone: docstrings, and those under a field."""
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def count_code_lines(library: Path) -> dict[Path, int]:
    """Code lines of every Python file below `library`."""
    return {
        path: code_lines(path.read_text(encoding="utf-8")) for path in sorted(library.rglob("*.py"))
    }


# Its parts that can be read without the rest, by their files and folders: what a run will need;
# one model on several stages; and what keeps a run alive.
PARTS = {
    "plan its memory": ("planning", "estimate.py", "fit.py", "live_memory.py"),
    "cut it into pipeline stages": (
        *("plan_pipeline.py", "verify.py", "models/stage.py", "models/flow.py", "models/pieces.py"),
        *("engine/pipeline.py", "engine/stages.py", "engine/unsplit.py"),
    ),
    "survive": (
        *("checkpoint", "guard", "engine/state.py", "engine/eight_bit.py", "engine/swap.py"),
        *("saving.py", "resumption.py", "probe.py", "watch.py", "exporting.py"),
    ),
}
TRAIN = "train"


def sizes(library: Path) -> dict[str, int]:
    """Code lines of the library, by what they do: each of PARTS, and all that train."""
    found = dict.fromkeys((TRAIN, *PARTS), 0)
    for path, count in count_code_lines(library).items():
        place = path.relative_to(library)
        part = next(
            (p for p, names in PARTS.items() if any(map(place.is_relative_to, names))), TRAIN
        )
        found[part] += count
    return found


def main() -> None:
    """Print all sizes and the ten longest files."""
    lines = count_code_lines(ROOT / "harness")
    for part, count in sizes(ROOT / "harness").items():
        print(f"{count:>6,} code lines that {part}")
    for path in sorted(lines, key=lambda path: -lines[path])[:10]:
        print(f"{lines[path]:>6,} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
