"""Formats numbers for readers, and escapes text for HTML."""

import html
import math
from datetime import UTC, datetime

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def escaped(value: object) -> str:
    """Return text escaped for HTML content and attributes; control characters become \\x1b etc."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in str(value))
    return html.escape(shown, quote=True)


def short(value: float | None, digits: int = 3) -> str:
    """Return a number as short text: 1234567 -> "1.23M"; 0.0003 -> "3e-4"."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, suffix in _UNITS:
        if size >= unit * 0.9995 and (unit > 1e3 or size >= 1e4):
            return f"{_plain(value / unit, digits)}{suffix}"
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return (
            f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
        )
    return _plain(value, digits)


def _plain(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    after = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{after}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float | None) -> str:
    """Return a rounded number with separators: 1234567.0 -> "1,234,567"."""
    return "-" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a duration as text: 3725 -> "1 h 2 min"; 95 -> "1 min 35 s"; 2.5 -> "2.5 s"."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def moment(unix_s: float | None) -> str:
    """Return seconds since 1970 as text, such as "2026-11-23 12:04 UTC"."""
    if unix_s is None:
        return "-"
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "-"


def gib(value: float | None) -> str:
    """Return bytes as text in GiB, or in MiB below a tenth of a GiB."""
    if value is None:
        return "-"
    return f"{value / 2**30:,.2f} GiB" if value >= 0.1 * 2**30 else f"{value / 2**20:,.1f} MiB"


def sentence(text: str) -> str:
    """Return a text with its first letter capitalised."""
    return text[:1].upper() + text[1:]


def cut(text: str, most: int) -> str:
    """Return the first characters of a text, followed by dots if any are left out."""
    return text if len(text) <= most else f"{text[:most]} ..."
