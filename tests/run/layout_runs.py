"""Runs of one length in several layouts."""

from __future__ import annotations

from pathlib import Path

from harness.runfolder import RunFolder
from tests.two_ranks import REPOSITORY, SHORT_RUN, SMALL_MODEL
from tools.proofs.zygote import Zygote


def trained(
    zygote: Zygote, words: list[str], folder: Path, layout: str, *more: str, ranks: int = 2
) -> RunFolder:
    """Return the folder of a run that went (on) in a layout."""
    json_path = REPOSITORY / "ds_configs" / f"{layout}.json"
    arguments = [f"--deepspeed={json_path}", *SMALL_MODEL, *SHORT_RUN, *words]
    ended = zygote.run(
        [*arguments, f"run.dir={folder}", *more],
        folder.parent / f"{folder.name}-logs",
        ranks=ranks,
    )
    assert ended.codes == [0] * ranks, ended.output
    return RunFolder(folder)
