"""Pictures of the tools, by matplotlib: SVG or PNG, as the file is called."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")


def plot_problems(path: Path | None) -> Iterator[str]:
    """Why nothing could be drawn into `path`; asked before any work is done."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        yield f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}"
    if not path.absolute().parent.is_dir():
        yield f"--plot {path}: there is no folder {path.parent}"
    if importlib.util.find_spec("matplotlib") is None:
        yield f"--plot {path} needs matplotlib: pip install matplotlib"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, drawn by no window system."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text as text, and the same file from the same numbers.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 9})
    return Figure(figsize=(width, height), layout="constrained")


def write_plot(path: Path, figure: Figure) -> None:
    """Write what --plot asked for, and say so."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=120)
    print(f"wrote {path}", file=sys.stderr)
