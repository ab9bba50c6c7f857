"""Screenshots of every page, for visual inspection: `python -m tests.pictures build/pictures`.

Each page at laptop and phone width, light and dark; further arguments select pages, such as
`studio-pipeline`. Output of the studio in its terminal counts as an error. The runs are those in
runs/ if there are any, otherwise a generated one with every kind of chart and event.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.report.compare import compare_page_of
from harness.report.page import page_of
from harness.report.run_record import is_run, read
from tests.browser import SHOWN, WIDTHS, Browser, missing
from tests.real_runs import REPOSITORY
from tests.report.runs import line_at, plan, write_run
from tests.studio.served import serving
from tests.tables import beside
from tools.studio_app.lessons import PAGES

_DRAWN = f"document.querySelector('.q-layout') ? {SHOWN} : !!document.querySelector('svg, table')"


def main(out: Path, *names: str) -> int:
    """Write the screenshots; a page fails if it has a console error or exceeds its window."""
    if reason := missing():
        print(f"no picture: it {reason}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    failures = 0
    with tempfile.TemporaryDirectory() as scratch, Browser() as browser:
        pages = dict(_reports(Path(scratch)))
        runs = REPOSITORY / "runs"
        shown = runs if any(map(is_run, runs.glob("*"))) else Path(scratch)
        with serving(shown, folder=Path(scratch)) as studio:
            pages |= {f"studio-{page.slug}": f"{studio.address}{page.slug}" for page in PAGES}
            pages["studio-home"] = studio.address
            for name, url in pages.items():
                if not names or name in names:
                    failures += sum(_taken(browser, name, url, out))
        failures += len(studio.said)
        print(studio.said, end="", file=sys.stderr)
    return int(bool(failures))


def _taken(browser: Browser, name: str, url: str, out: Path) -> Iterator[bool]:
    """Write a page's screenshots; yield True for each one with a problem."""
    for width in WIDTHS:
        for dark in (False, True):
            page = browser.open(url, width, dark=dark)
            page.wait_for(_DRAWN)
            browser.listen(1.0)  # content drawn after loading
            path = out / f"{name}-{width}{'-dark' * dark}.png"
            page.screenshot(path)
            problems = [*page.errors, *(["wider than its window"] * page.overflows)]
            print(path, *problems, sep="\n  ", flush=True)
            page.close()
            yield bool(problems)


def _reports(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and address of the pages of one run and of several."""
    runs = sorted(path for path in (REPOSITORY / "runs").glob("*") if is_run(path))
    paths = [*runs[-4:], _made(folder / "every-kind", 3e-4), _made(folder / "lower-rate", 1e-4)]
    recorded = [read(path) for path in paths]
    pages = {f"report-{run.name}": page_of(run) for run in recorded}
    pages["report-several"] = compare_page_of(recorded, "Several runs")
    for name, page in pages.items():
        path = folder / f"{name}.html"
        path.write_text(page)
        yield name, path.as_uri()


def _made(folder: Path, rate: float) -> Path:
    lines = [line_at(step, learning_rate=rate * min(1, step / 40)) for step in range(1, 201)]
    for line in lines:
        line |= {"loss": line["loss"] + 3e-5 / rate, "loss/code": line["loss"] - 0.3}
        line |= {"peak_allocated_gib": 2.3, "expert_load_max": 1 + 40 / (20 + line["step"])}
        line |= {"global_batch": 8 + 8 * (line["step"] > 60)}
    for line in lines[9::10]:
        line |= {f"attention_entropy/{n}": 3 - n / 9 + line["step"] / 400 for n in range(12)}
        line |= {f"attention_coverage/{n}": 0.2 + n / 30 for n in range(12)}
        line |= {"param_norm": 40 + line["step"] / 20, "update_ratio": 0.1 / (20 + line["step"])}
    for line in lines[24::25]:
        line["eval_loss"] = line["loss"] + 0.12
        line["loss_by_position"] = [line["loss"] + 2 / (1 + place) for place in range(16)]
    lines[110]["loss"] = 6.5
    events = beside(__file__, "pictures.toml")["events"]
    return write_run(folder, lines, events, plan(lr=rate))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
