"""One rank that builds an engine per layout and asks it for every name of the contract."""

from __future__ import annotations

import json
import traceback

from harness.engine.processes import ending_together
from tests.engine.deepspeed_0_19.contract import CONTRACT, LAYOUTS
from tests.engine.rank import OUT, WORLD, engine_of, share_of


def answers_of(layout: str) -> dict[str, str]:
    """Return the problem of each name that is read of a layout; "" if there is none."""
    engine = engine_of(LAYOUTS[layout])
    engine.train_batch(*share_of(engine), 1e-3)
    engine.accumulate(*share_of(engine))
    answers = {}
    for name, (where, expected) in CONTRACT.items():
        if where == layout:
            try:
                answers[name] = "" if expected(engine.engine) else "is not what it was"
            except Exception:
                answers[name] = traceback.format_exc()
    engine.close()
    return answers


def main() -> None:
    with ending_together():
        answers: dict[str, str] = {}
        for layout in LAYOUTS:
            try:
                answers |= answers_of(layout)
            except Exception:
                answers[layout] = traceback.format_exc()
            print(layout, "ended", flush=True)
        (OUT / f"{WORLD.rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
