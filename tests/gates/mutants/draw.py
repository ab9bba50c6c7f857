"""Draws small changes: a file of the room by its lines, one of its lines, a change of that line."""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import OPERATOR_PROVIDERS, get_operator
from cosmic_ray.util import read_python_source
from cosmic_ray.work_item import MutationSpec, WorkItem
from parso.python.tree import Name

from tests.tables import beside

FEWEST = 6  # changes per room
# Arguments that are text for the reader, or equal to their default here.
_TEXT = re.compile("(help|metavar|description|epilog|title|label|prog|encoding|errors|flush)=")


class _Replace(Operator):  # type: ignore[misc]
    """Replaces a node by each of its `texts`."""

    def __init__(self, texts: Callable[[Any], list[str]]) -> None:
        self.texts = texts

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        return ((node.start_pos, node.end_pos) for _ in self.texts(node))

    def mutate(self, node: Any, index: int) -> Any:
        end = "\n" if node.type == "simple_stmt" else ""
        prefix = node.get_first_leaf().prefix
        return Name(self.texts(node)[index] + end, node.start_pos, prefix=prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _no_call(node: Any) -> list[str]:
    """Replace a statement that only calls a function by `pass`."""
    called = node.type == "simple_stmt" and node.children[0].type == "atom_expr"
    return ["pass"] if called and node.get_code().rstrip().endswith(")") else []


def _one_of(node: Any) -> list[str]:
    """Replace `min(a, b)` by a, and by b."""
    code = node.get_code(include_prefix=False) if node.type == "atom_expr" else ""
    if not re.match(r"(min|max)\(", code) or node.children[1].children[1].type != "arglist":
        return []
    return [f"({part.get_code().strip()})" for part in node.children[1].children[1].children[::2]]


def _no_keyword(node: Any) -> list[str]:
    """Leave out one of a call's keyword arguments."""
    parts = node.children[::2] if node.type == "arglist" else []
    codes = [part.get_code().strip() for part in parts]
    return [
        ", ".join(codes[:index] + codes[index + 1 :])
        for index, part in enumerate(parts)
        if part.type == "argument" and part.children[1] == "=" and not _TEXT.match(codes[index])
    ]


_OWN = {"NoCall": _no_call, "OneOf": _one_of, "NoKeyword": _no_keyword}
OPERATOR_PROVIDERS["own"] = {name: partial(_Replace, texts) for name, texts in _OWN.items()}
_CORE: dict[str, str] = beside(__file__, "operators.toml")["core"]
OPERATORS = [f"core/{kind}{name}" for kind, names in _CORE.items() for name in names.split()]
OPERATORS += [f"own/{name}" for name in _OWN]
# Beside texts and annotations: beliefs (strict zips, frozen dataclasses), and signatures, whose `*`
# and `/` are no operators.
_LEFT_OUT = re.compile(
    r"TYPE_CHECKING|__name__ ==|\bprint\(|\b(log|logger|logging|warnings)\.|add_argument|Literal\[|"
    r"^def |^ +def |^ +\w+: .*, \*, |strict=True|@dataclass\(frozen=True\)"
)


def _is_left_out(node: Any) -> bool:
    """Return True for texts, messages of errors and annotations."""
    while parent := node.parent:
        place = parent.children.index(node)
        if parent.type in ("fstring", "raise_stmt", "tfpdef", "strings"):
            return True
        if (parent.type, place) in (("annassign", 1), ("assert_stmt", 3)):
            return True
        if parent.type == "funcdef" and parent.children[place - 1] == "->":
            return True
        whole = parent.type in ("simple_stmt", "atom_expr")
        if whole and _LEFT_OUT.match(parent.get_code(include_prefix=False)):
            return True
        node = parent
    return False


def room_of(file: str) -> str:
    """Return the folder of the product that a file belongs to, as tests/sizes.toml names it."""
    parts = Path(file).parts
    return "/".join(parts[:2]) if parts[2:] else parts[0]


def rooms(tree: Path, files: list[str]) -> dict[str, dict[str, int]]:
    """Return the lines of each file, by room."""
    lines: dict[str, dict[str, int]] = defaultdict(dict)
    for file in files:
        lines[room_of(file)][file] = len((tree / file).read_text(encoding="utf-8").splitlines())
    return dict(sorted(lines.items()))


def quotas(rooms: dict[str, dict[str, int]], count: int) -> dict[str, int]:
    """Return how many changes each room gets, by its lines."""
    lines = {name: sum(files.values()) for name, files in rooms.items()}
    total = sum(lines.values())
    return {name: max(FEWEST, round(count * part / total)) for name, part in lines.items()}


@cache
def _changes(path: Path) -> dict[int, list[tuple[str, int, Any, Any]]]:
    """Return the changes of each line: operator, occurrence, first and last position."""
    changes: dict[int, list[tuple[str, int, Any, Any]]] = defaultdict(list)
    seen = Counter[str]()
    operators = [(name, get_operator(name)()) for name in OPERATORS]
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast_nodes(get_ast_from_path(path)):
        for name, operator in operators:
            for start, end in operator.mutation_positions(node):
                if not _LEFT_OUT.search(lines[start[0] - 1]) and not _is_left_out(node):
                    changes[start[0]].append((name, seen[name], start, end))
                seen[name] += 1
    return dict(sorted(changes.items()))


def draw(tree: Path, room: str, files: dict[str, int], seed: int) -> Iterator[WorkItem]:
    """Yield different changes of a room that compile, the same for a seed."""
    drawn = set()
    for number in range(10_000):
        choose = random.Random(f"{seed} {room} {number}")  # a changed file moves only its own
        file = choose.choices([*files], [*files.values()])[0]
        if not (changes := _changes(tree / file)):
            continue
        operator, occurrence, start, end = choose.choice(changes[choose.choice([*changes])])
        changed = mutate_code(read_python_source(tree / file), get_operator(operator)(), occurrence)
        try:
            compile(changed, file, "exec")
        except SyntaxError:
            continue
        if changed not in drawn:
            drawn.add(changed)
            change = MutationSpec(tree / file, operator, occurrence, start, end)
            checksum = zlib.crc32((tree / file).read_bytes())
            name = f"{file}:{start[0]} {operator.partition('/')[2]} {occurrence} {checksum:08x}"
            yield WorkItem.single(name, change)
