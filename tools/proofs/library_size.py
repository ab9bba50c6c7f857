"""Print the code lines of each room, and the library's ten longest files.

python tools/proofs/library_size.py

Blank lines, comments and docstrings are not counted: they explain.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def rooms(folder: Path) -> dict[str, int]:
    """Code lines below `folder` by its folders, those of files beside them under its own name."""
    lines: Counter[str] = Counter()
    for path, count in count_code_lines(folder).items():
        parts = path.relative_to(folder).parts
        lines[f"{folder.name}/{parts[0]}" if len(parts) > 1 else folder.name] += count
    return dict(lines)


def main() -> None:
    """Print the sizes of all rooms, and the library's ten longest files."""
    for name in ("harness", "tools", "tests"):
        counts = rooms(ROOT / name)
        print(f"{sum(counts.values()):>6,} code lines in {name}/")
        for room, count in sorted(counts.items(), key=lambda item: -item[1]):
            print(f"        {count:>6,} {room}")
    lines = count_code_lines(ROOT / "harness")
    for path in sorted(lines, key=lambda path: -lines[path])[:10]:
        print(f"{lines[path]:>6,} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
