"""Colours and fonts of every picture and page, for light and for dark surfaces.

Neighbours in COMPONENTS, the order in which memory is stacked, can also be told apart by red- and
green-blind readers (OKLab distance at least 0.12 after Machado's simulation, DOI
10.1109/TVCG.2009.113). Colour alone never carries a meaning: labels say the same.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Colour(NamedTuple):
    """One colour, as hex, for each kind of surface."""

    light: str
    dark: str


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COMPONENTS = {name: Colour(*pair) for name, pair in _TABLES["components"].items()}
"""Uses of memory, in stacking order."""
VERDICTS = {name: Colour(*pair) for name, pair in _TABLES["verdicts"].items()}
"""Text colours, with a contrast of at least 4.5 on SURFACE."""
SERIES = tuple(Colour(*pair) for pair in _TABLES["series"])
"""Curves and runs, by their index; those beyond the last are grey."""
_NEUTRAL = {name: Colour(*pair) for name, pair in _TABLES["neutral"].items()}
INK, MUTED, FAINT, GRID, SURFACE, PAGE = _NEUTRAL.values()
LIMIT = VERDICTS["bad"]
"""Lines that must not be crossed, always with their label."""

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial")
_MONOSPACE = 'ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace'


def css() -> str:
    """Return every colour as a CSS variable, `--weights` to `--series-8`.

    The reader's system chooses light or dark, unless `<html data-theme="light">` or `"dark"` does.
    """
    named = {**COMPONENTS, **VERDICTS}
    named |= {f"series-{place}": colour for place, colour in enumerate(SERIES, 1)} | _NEUTRAL
    light = ";".join(f"--{name}:{colour.light}" for name, colour in named.items())
    dark = ";".join(f"--{name}:{colour.dark}" for name, colour in named.items())
    light = f"color-scheme:light;{light}"
    dark = f"color-scheme:dark;{dark}"
    sans = ",".join(f'"{name}"' if " " in name else name for name in FONTS)
    return (
        f":root{{--font:{sans},sans-serif;--mono:{_MONOSPACE};{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
    )
