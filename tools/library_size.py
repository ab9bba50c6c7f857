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


def sizes(library: Path) -> tuple[int, int]:
    """Code lines of the library without planning/, and of planning/: the estimator's accounts,
    which need nothing but the standard library and run nowhere near a GPU.
    """
    lines = count_code_lines(library)
    planning = sum(count for path, count in lines.items() if library / "planning" in path.parents)
    return sum(lines.values()) - planning, planning


def main() -> None:
    """Print both sizes and the ten longest files."""
    lines = count_code_lines(ROOT / "harness")
    training, planning = sizes(ROOT / "harness")
    print(f"{training:>6,} code lines that train, and {planning:,} in harness/planning")
    for path in sorted(lines, key=lambda path: -lines[path])[:10]:
        print(f"{lines[path]:>6,} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
