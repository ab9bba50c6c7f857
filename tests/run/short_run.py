"""A short run on two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.two_ranks import REPOSITORY, SHORT_RUN
from tools.proofs.zygote import Zygote


def train(zygote: Zygote, layout: str, run: Path, *words: str, code: int = 0) -> str:
    """End a run on two ranks with `code`; return its output."""
    json_path = REPOSITORY / "ds_configs" / f"{layout}.json"
    arguments = [f"--deepspeed={json_path}", *SHORT_RUN, f"run.dir={run}", *words]
    ended = zygote.run(arguments, run.parent / f"{run.name}-logs")
    assert ended.codes == [code, code], ended.output
    return ended.output
