"""The installed command: every verb from an empty folder, its arguments and its exit code."""

import json
import tomllib
from pathlib import Path
from typing import Any

from harness.launch.verbs import verbs
from tests.real_runs import REPOSITORY
from tests.run_tools import printed
from tests.tables import beside
from tests.test_tool_arguments import HEAVY

TABLES = beside(__file__, "verbs.toml")


def test_every_verb_works_in_an_empty_folder(tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    ((name, entry),) = project["scripts"].items()
    assert name == project["name"]  # no other distribution installs it
    helps = {v: "train.py" if v == "train" else f"{name} {v}" for v in verbs()}
    rows: list[Any] = [[f"{verb} --help", 0, f"usage: {prog}"] for verb, prog in helps.items()]
    rows += TABLES["refused_and_passed_on"]
    asked = json.dumps([words.split() for words, *_ in rows])
    lines = printed(TABLES["run"], entry, " ".join(HEAVY), asked, cwd=tmp_path).splitlines()
    for (words, code, text), line in zip(rows, lines, strict=True):
        ended, shown, *loaded = json.loads(line)
        assert (ended, text in shown, loaded) == (code, True, []), (words, shown)
    assert [*tmp_path.iterdir()] == []
