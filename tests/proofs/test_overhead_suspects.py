"""The table of switched suspects, from starts whose times are known."""

from __future__ import annotations

from typing import Any

from tools.proofs.overhead.suspects import NOTHING, SUSPECTS, suspect_rows


def _start(seconds: float, faults: int) -> list[dict[str, Any]]:
    return [{"step_s": [seconds, 9.0, 0.0], "page_faults": [faults]}]


def _round(number: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Bare DeepSpeed takes 2 s and with a switch 4 s; the harness 1, 2 or 3 s, and a switch of its
    own brings it to 8 s.
    """
    return {
        name: {
            "harness": _start(float(number) if suspect.is_of_both or name == NOTHING else 8.0, 7),
            **({"bare": _start(4.0, 5)} if suspect.is_of_both else {}),
            **({"bare": _start(2.0, 6)} if name == NOTHING else {}),
        }
        for name, suspect in SUSPECTS.items()
    }


def test_each_side_is_compared_with_the_same_switch() -> None:
    head, _, *rows = suspect_rows([_round(number) for number in (1, 2, 3)])
    cells = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in rows}
    assert set(cells) == set(SUSPECTS)
    assert head.count("|") == rows[0].count("|")
    assert cells[NOTHING][0] == "0.55, **1.000**, 1.45"  # 0.5, 1, 1.5
    assert cells["no metrics"][:2] == ["4.00, **4.000**, 4.00", "4.000"]  # 8 / 2, and 8 / 2
    assert cells["huge pages"] == ["0.28, **0.500**, 0.72", "1.000", "2.000", "7", "5"]
