"""Colours and fonts of every picture and page, for light and for dark surfaces.

Neighbours in COMPONENTS, the order in which memory is stacked, can also be told apart by red- and
green-blind readers (OKLab distance at least 0.12 after Machado's simulation, DOI
10.1109/TVCG.2009.113). Colour alone never carries a meaning: labels say the same.
"""

from typing import NamedTuple


class Colour(NamedTuple):
    """One colour, as hex, for each kind of surface."""

    light: str
    dark: str


COMPONENTS = {
    "weights": Colour("#2a78d6", "#3987e5"),
    "gradients": Colour("#eb6834", "#d95926"),
    "optimizer": Colour("#4a3aa7", "#9085e9"),
    "activations": Colour("#008300", "#008300"),
    "logits": Colour("#e87ba4", "#d55181"),
    "buffers": Colour("#eda100", "#c98500"),
}
"""Uses of memory, in stacking order."""

VERDICTS = {
    "good": Colour("#0a7d0a", "#35b835"),
    "warning": Colour("#9a6700", "#e3a008"),
    "bad": Colour("#c42b2b", "#f07070"),
}
"""Text colours, with a contrast of at least 4.5 on SURFACE."""

SERIES = (
    Colour("#2a78d6", "#3987e5"),  # blue
    Colour("#eb6834", "#d95926"),  # orange
    Colour("#1baf7a", "#199e70"),  # aqua
    Colour("#4a3aa7", "#9085e9"),  # violet
    Colour("#e87ba4", "#d55181"),  # magenta
    Colour("#008300", "#008300"),  # green
    Colour("#eda100", "#c98500"),  # yellow
    Colour("#e34948", "#e66767"),  # red
)
"""Curves and runs, by their index; those beyond the last are grey."""

INK = Colour("#0b0b0b", "#f5f5f4")
"""Text, and lines that are the subject."""
MUTED = Colour("#5f5e5a", "#a8a69d")
"""Captions and axis labels."""
FAINT = Colour("#c3c2b7", "#4a4a47")
"""Axes and reference lines."""
GRID = Colour("#e8e7e1", "#2f2f2d")
"""Grid lines and borders."""
SURFACE = Colour("#ffffff", "#1a1a19")
"""Cards, and the background of pictures."""
PAGE = Colour("#f6f5f2", "#0f0f0e")
"""Background behind cards."""
LIMIT = VERDICTS["bad"]
"""Lines that must not be crossed, always with their label."""

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial")
_MONOSPACE = 'ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace'


def css() -> str:
    """Return every colour as a CSS variable, `--weights` to `--series-8`.

    The reader's system chooses light or dark, unless `<html data-theme="light">` or `"dark"` does.
    """
    named = {
        **COMPONENTS,
        **VERDICTS,
        **{f"series-{place}": colour for place, colour in enumerate(SERIES, 1)},
        "ink": INK,
        "muted": MUTED,
        "faint": FAINT,
        "grid": GRID,
        "surface": SURFACE,
        "page": PAGE,
    }
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
