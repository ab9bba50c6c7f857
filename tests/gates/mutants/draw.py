"""Draws small changes: a file of the room by its lines, one of its lines, a change of that line."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import OPERATOR_PROVIDERS, get_operator
from cosmic_ray.util import read_python_source
from cosmic_ray.work_item import MutationSpec
from parso.python.tree import Name

FEWEST = 6  # changes per room


class _Replace(Operator):  # type: ignore[misc]
    """Replaces a node by each of the texts of `texts`."""

    @staticmethod
    def texts(node: Any) -> list[str]:
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        for _ in self.texts(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        end = "\n" if node.type == "simple_stmt" else ""
        prefix = node.get_first_leaf().prefix
        return Name(self.texts(node)[index] + end, node.start_pos, prefix=prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class NoCall(_Replace):
    """A statement that only calls a function: `pass`."""

    @staticmethod
    def texts(node: Any) -> list[str]:
        called = node.type == "simple_stmt" and node.children[0].type == "atom_expr"
        return ["pass"] if called and node.get_code().rstrip().endswith(")") else []


class OneOf(_Replace):
    """`min(a, b)`: a, and b."""

    @staticmethod
    def texts(node: Any) -> list[str]:
        code = node.get_code(include_prefix=False) if node.type == "atom_expr" else ""
        if not re.match(r"(min|max)\(", code) or node.children[1].children[1].type != "arglist":
            return []
        arguments = node.children[1].children[1].children[::2]
        return [f"({argument.get_code().strip()})" for argument in arguments]


class NoKeyword(_Replace):
    """A call without one of its keyword arguments."""

    @staticmethod
    def texts(node: Any) -> list[str]:
        parts = node.children[::2] if node.type == "arglist" else []
        codes = [part.get_code().strip() for part in parts]
        keywords = [
            index
            for index, part in enumerate(parts)
            if part.type == "argument" and part.children[1] == "=" and not _TEXT.match(codes[index])
        ]
        return [", ".join(codes[:index] + codes[index + 1 :]) for index in keywords]


# Arguments that are text for the reader, or equal to their default here.
_TEXT = re.compile("(help|metavar|description|epilog|title|label|prog|encoding|errors|flush)=")
_OWN = {operator.__name__: operator for operator in (NoCall, OneOf, NoKeyword)}
OPERATOR_PROVIDERS["own"] = _OWN
_COMPARISONS = (
    "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
)
_BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Div FloorDiv_Mul Mod_FloorDiv"
OPERATORS = [
    *(f"core/ReplaceComparisonOperator_{name}" for name in _COMPARISONS.split()),
    *(f"core/ReplaceBinaryOperator_{name}" for name in _BINARY.split()),
    *(f"core/ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub")),
    *(
        f"core/Replace{name}"
        for name in ("TrueWithFalse", "FalseWithTrue", "AndWithOr", "OrWithAnd")
    ),
    *(f"core/Replace{name}" for name in ("BreakWithContinue", "ContinueWithBreak")),
    *(f"core/{name}" for name in ("AddNot", "NumberReplacer", "ZeroIterationForLoop")),
    "core/ExceptionReplacer",
    *(f"own/{name}" for name in _OWN),
]
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
        if parent.type == "annassign" and place == 1:
            return True
        if parent.type == "funcdef" and parent.children[place - 1] == "->":
            return True
        if parent.type == "assert_stmt" and place == 3:
            return True
        if parent.type in ("simple_stmt", "atom_expr") and _LEFT_OUT.match(
            parent.get_code(include_prefix=False)
        ):
            return True
        node = parent
    return False


@dataclass(frozen=True)
class Room:
    """A folder of the product, with the lines of each file."""

    name: str
    files: dict[str, int]


def rooms(tree: Path, files: list[str]) -> list[Room]:
    """Return the rooms of `files`, as tests/sizes.toml names them."""
    of: dict[str, dict[str, int]] = defaultdict(dict)
    for file in files:
        parts = Path(file).parts
        lines = len((tree / file).read_text(encoding="utf-8").splitlines())
        of["/".join(parts[:2]) if parts[2:] else parts[0]][file] = lines
    return [Room(*pair) for pair in sorted(of.items())]


def quotas(rooms: list[Room], count: int) -> dict[str, int]:
    """Return how many changes each room gets, by its lines."""
    lines = {room.name: sum(room.files.values()) for room in rooms}
    total = sum(lines.values())
    return {name: max(FEWEST, round(count * part / total)) for name, part in lines.items()}


@cache
def _changes(path: Path) -> dict[int, list[tuple[str, int, Any]]]:
    """Return the changes of each line: operator, occurrence and node."""
    found: dict[int, list[tuple[str, int, Any]]] = defaultdict(list)
    seen = Counter[str]()
    operators = [(name, get_operator(name)()) for name in OPERATORS]
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast_nodes(get_ast_from_path(path)):
        for name, operator in operators:
            for start, end in operator.mutation_positions(node):
                line = start[0]
                if not _LEFT_OUT.search(lines[line - 1]):
                    found[line].append((name, seen[name], (node, start, end)))
                seen[name] += 1
    return {
        line: kept
        for line, changes in sorted(found.items())
        if (kept := [change for change in changes if not _is_left_out(change[2][0])])
    }


def draw(tree: Path, room: Room, seed: int) -> Iterator[MutationSpec]:
    """Yield different changes of a room that compile, the same for a seed."""
    drawn = set()
    for number in range(10_000):
        choose = random.Random(f"{seed} {room.name} {number}")  # a changed file moves only its own
        file = choose.choices([*room.files], [*room.files.values()])[0]
        if not (changes := _changes(tree / file)):
            continue
        place = choose.choice(changes[choose.choice([*changes])])
        operator, occurrence, (_, start, end) = place
        changed = mutate_code(read_python_source(tree / file), get_operator(operator)(), occurrence)
        try:
            compile(changed, file, "exec")
        except SyntaxError:
            continue
        if changed not in drawn:
            drawn.add(changed)
            yield MutationSpec(tree / file, operator, occurrence, start, end)
