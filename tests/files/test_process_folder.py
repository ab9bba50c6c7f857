"""Folders of one process: kept while it lives, removed by the next one after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.files.process_folder import make_folder, remove_left_over
from tests.real_runs import REPOSITORY

LIVES = """
import sys
from pathlib import Path
from harness.files.process_folder import make_folder
print(make_folder(Path(sys.argv[1]), "optimizer").name, flush=True)
sys.stdin.read()
"""


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    command = [sys.executable, "-c", LIVES, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes) as process:
        assert process.stdout is not None
        folder = tmp_path / process.stdout.readline().strip()
        (folder / "states.swp").touch()
        own = make_folder(tmp_path, "optimizer")
        remove_left_over(tmp_path, "optimizer")
        assert {*tmp_path.iterdir()} == {folder, own, others}
        process.kill()
    remove_left_over(tmp_path, "optimizer")
    assert {*tmp_path.iterdir()} == {own, others}
    remove_left_over(tmp_path / "none", "optimizer")
