"""Colours are distinguishable and readable."""

from itertools import pairwise

import pytest

from harness.report.chart import colour_of
from harness.report.palette import COMPONENTS, INK, MUTED, SERIES, SURFACE, VERDICTS, css
from tests.tables import beside

_EYES = beside(__file__, "palette.toml")["eyes"]


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def oklab(rgb: list[float]) -> tuple[float, float, float]:
    red, green, blue = (min(1.0, max(0.0, part)) for part in rgb)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
    )


def seen(colour: str, eye: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    return oklab([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in _EYES[eye]])


def distance(first: str, second: str, eye: str) -> float:
    places = zip(seen(first, eye), seen(second, eye), strict=True)
    return sum((a - b) ** 2 for a, b in places) ** 0.5


def contrast(first: str, second: str) -> float:
    light = [
        sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True))
        for c in (first, second)
    ]
    return (max(light) + 0.05) / (min(light) + 0.05)


@pytest.mark.parametrize("surface", ["light", "dark"])
@pytest.mark.parametrize("eye", list(_EYES))
def test_stacked_components_are_told_apart(surface, eye):
    for (first, a), (second, b) in pairwise(COMPONENTS.items()):
        apart = distance(getattr(a, surface), getattr(b, surface), eye)
        assert apart >= 0.12, (first, second, apart)


@pytest.mark.parametrize("surface", ["light", "dark"])
def test_palette_text_contrast_is_readable(surface):
    for colour in (INK, MUTED, *VERDICTS.values()):
        ratio = contrast(getattr(colour, surface), getattr(SURFACE, surface))
        assert ratio >= 4.5, (colour, ratio)


@pytest.mark.parametrize("surface", ["light", "dark"])
def test_no_colour_drowns_in_the_surface(surface):
    for colour in (*COMPONENTS.values(), *SERIES):
        ratio = contrast(getattr(colour, surface), getattr(SURFACE, surface))
        assert ratio >= 2, (colour, ratio)


def test_css_names_every_colour_for_both_surfaces():
    text = css()
    named = {f"var(--{name})": colour for name, colour in COMPONENTS.items()}
    named |= {colour_of(place): colour for place, colour in enumerate(SERIES)}
    for name, colour in named.items():
        assert f"{name[4:-1]}:{colour.light};" in text
        assert f"{name[4:-1]}:{colour.dark};" in text
