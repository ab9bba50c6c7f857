"""Reports of tools/clean_data.py on the cleaning page: a real one, malicious names, damaged
files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ExitCode
from tests.studio.test_pages import BY_SLUG, figures_of, number
from tools.cleaning.strictness import STRICTNESS, measured, report_at
from tools.studio_app.cleanings import names, read_cleaning
from tools.studio_app.figures import html_of

HOSTILE = "<img src=x onerror=window.hacked=1>"


def left(documents: int, **more: Any) -> dict[str, Any]:
    sizes = {"characters": 10 * documents, "quality": 0.5, "diversity": 7, "packing": 0.4}
    return {"documents": documents, **sizes, **more}


def write_report(folder: Path, **changes: Any) -> Path:
    """Write a report as report_of does, with the fields that the page reads."""
    report = {
        "corpus": "/data/pages",
        "documents": {"read": 100, "empty": 0, "written": 60},
        "strictness": [
            left(50 - at // 5, strictness=at, rejected={"words": 3}) for at in STRICTNESS
        ],
        "after_steps": [left(50, step="read"), left(30, step="gopher_quality")],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.json"
    path.write_text(json.dumps(report | changes))
    return path


@pytest.mark.gate("pages")
def test_a_real_report_is_shown_as_it_counts(runs: Path) -> None:
    """Compared with the same rules on the same documents, without the tool's pipeline."""
    pytest.importorskip("datatrove", reason="needs datatrove: pip install datatrove")
    from tools.clean_data import main

    prose = (
        "The keeper of the light writes down what the sea does, and reads it to nobody in winter."
    )
    texts = [f"{prose} {word} " * (1 + n % 9) for n, word in enumerate(prose.split() * 3)]
    texts += ["\n".join(["x = 1"] * (5 + n)) for n in range(12)]
    corpus = runs.parent / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main([str(corpus), str(runs / "cleaned"), "--workers=1"]) == ExitCode.DONE
    assert names() == ["cleaned"]
    documents = [measured(str(n), text) for n, text in enumerate(texts)]
    for strictness in (0, 40, 80, 100):
        shown = figures_of("cleaning", corpus="cleaned", strictness=str(strictness))
        direct = report_at(documents, strictness)
        kept = f"{len(direct.kept):,} of {len(texts):,}"
        assert number(shown, "Documents kept") == kept
        assert number(shown, "Quality") == f"{direct.quality:.1%}"
        assert number(shown, "Diversity") == f"{direct.diversity:,}"
    read = json.loads((runs / "cleaned/report.json").read_text())["documents"]
    (recipe,) = (f for f in shown if getattr(f, "title", "").startswith("corpus.jsonl: "))
    assert f"{read['written']:,} of {read['read']:,}" in recipe.title  # type: ignore[union-attr]


def test_reports_are_a_list_to_choose_from(runs: Path) -> None:
    write_report(runs / "sets/pages")
    corpus = next(c for c in BY_SLUG["cleaning"].controls if c.name == "corpus")
    assert corpus.options == ("Python's own library", "sets/pages")  # type: ignore[union-attr]
    assert number(figures_of("cleaning", corpus="sets/pages"), "Documents kept") == "34 of 50"


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "pages/..", "pages/../../secret", ""])
def test_no_name_leads_out(runs: Path, name: str) -> None:
    write_report(runs / "pages")
    write_report(runs.parent / "secret")
    with pytest.raises(ValueError, match="there is no report"):
        read_cleaning(name)
    shown = figures_of("cleaning", corpus=name)
    assert number(shown, "Documents kept") == number(figures_of("cleaning"), "Documents kept")


def test_no_link_leads_out(runs: Path) -> None:
    secret = write_report(runs.parent / "secret")
    (runs / "linked").symlink_to(secret.parent)
    assert names() == []
    (runs / "pages").mkdir()
    (runs / "pages/report.json").symlink_to(secret)
    with pytest.raises(ValueError, match="is a link") as error:
        read_cleaning("pages")
    assert str(runs.parent) not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"strictness": []}, "strictness"),
        ({"strictness": [left(-1, strictness=0, rejected={})]}, "greater than or equal to 0"),
        ({"strictness": [left(1, strictness=0, rejected={HOSTILE: 1})]}, "from another version"),
        ({"after_steps": [left(1, step=HOSTILE)]}, "from another version"),
        ({"documents": HOSTILE}, "documents"),
    ],
)
def test_a_damaged_report_is_a_note(runs: Path, changes: dict[str, Any], why: str) -> None:
    from tools.studio_app.page import read_values
    from tools.studio_app.view import figures_of as shown_by

    write_report(runs / "pages", **changes)
    page = BY_SLUG["cleaning"]
    (note,) = shown_by(page, read_values(page.controls, {"corpus": "pages"}))
    assert why in note.text  # type: ignore[union-attr]
    assert "<img" not in html_of(note)


def test_half_a_file_and_no_file_are_notes(runs: Path) -> None:
    path = write_report(runs / "pages")
    path.write_text(path.read_text()[:40])
    (runs / "other/report.json").mkdir(parents=True)
    for name in ("pages", "other"):
        with pytest.raises(ValueError, match=rf"^{name}/report.json "):
            read_cleaning(name)


def test_names_are_text(runs: Path) -> None:
    write_report(runs / HOSTILE, corpus=f"/data/{HOSTILE}")
    shown = figures_of("cleaning", corpus=HOSTILE)
    html = "".join(html_of(figure) for figure in shown)
    assert "&lt;img" in html
    assert "<img" not in html
