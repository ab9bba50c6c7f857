"""Values of data.format: each is one file of harness/files/formats/."""

import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from harness.files import file_kinds, formats
from harness.files.file_kinds import FORMATS, format_of, kind_of
from tests.tables import beside

TABLES = beside(__file__, "formats.toml")
ROOT = Path(__file__).parents[2]
SPLIT = ("data.seq_len=16", "data.held_out=0.3")


def run(folder: Path, *arguments: str) -> str:
    """Return a command's output in a folder, also if it fails."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.gate("data")
def test_a_new_format_is_one_new_file(tmp_path: Path) -> None:
    """In a copy of the library, a dry run, the key and the tokens support it."""
    for room in ("harness", "ds_configs"):
        shutil.copytree(ROOT / room, tmp_path / room)
    (tmp_path / "harness/files/formats/bar_separated.py").write_text(TABLES["psv"])
    rows = "".join(f"row {number} of a table\n" for number in range(100))
    for name in ("rows.psv", "rows.dat", "bad.psv"):
        (tmp_path / name).write_text(rows + ("a|b\n" if name == "bad.psv" else ""))

    printed = run(tmp_path, "harness/train.py", "--dry-run", "data.path=rows.psv", *SPLIT)
    assert "rows.psv: 100 documents, " in printed
    assert "the first begins 'row 0 of a table'" in printed
    printed = run(tmp_path, "harness/train.py", "--dry-run", "data.format=pvs")
    assert "data.format is 'pvs' (command line): it must be 'text', " in printed
    assert "'psv'" in printed
    by_suffix, named, bad = run(tmp_path, "-c", TABLES["read"]).splitlines()[-3:]
    assert by_suffix.startswith("rows.psv: 100 documents, ")
    assert named.removeprefix("rows.dat") == by_suffix.removeprefix("rows.psv")
    assert bad == "data.path: bad.psv:101: has a second column"


def test_formats_have_one_file_each_and_disjoint_suffixes() -> None:
    files = {path.stem for path in Path(formats.__path__[0]).glob("*.py")} - {"__init__"}
    assert len(FORMATS) == len(files)
    assert next(iter(FORMATS)) == "text"  # first in errors; used for names without a suffix
    suffixes = Counter(suffix for format in FORMATS.values() for suffix in format.suffixes)
    assert [suffix for suffix, claims in suffixes.items() if claims > 1] == []
    assert all(suffix in ("", suffix.lower()) for suffix in suffixes)


def test_format_may_claim_a_longer_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zipped = replace(FORMATS["text"], name="txt.gz", suffixes=frozenset({".txt.gz"}))
    monkeypatch.setitem(file_kinds._OF_SUFFIX, ".txt.gz", zipped)
    assert format_of(tmp_path / "a.b.TXT.gz", None) is zipped
    for name in ("a.txt.gz", "a.md.gz", "a.gz", "txt.gz"):
        (tmp_path / name).touch()
    assert kind_of(tmp_path / "a.txt.gz", None) == ("documents", "")
    for name in ("a.md.gz", "a.gz", "txt.gz"):
        kind, advice = kind_of(tmp_path / name, None)
        assert (kind, advice[:13]) == ("data", "is compressed")
