"""The chat templates that data.template may name: those that ship, and .jinja files."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from harness.errors import ConfigError, Unusable
from harness.files.paths import user_path
from harness.files.regular_file import read_regular

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "templates"
_MOST_BYTES = 1 << 20


def template_names() -> list[str]:
    """Return the names of the templates that ship with the harness."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def read_template(template: str) -> str:
    """Return the text of a template by its name, or of a .jinja file. Raises ConfigError."""
    names = template_names()
    named = TEMPLATES / f"{template}.jinja"
    path = named if template in names else user_path("data.template", template)
    try:
        return read_regular(path, _MOST_BYTES, links=True).decode()
    except (OSError, Unusable, UnicodeDecodeError) as error:
        wanted = f"it must be a .jinja file or one of {', '.join(names)}"
        if not path.suffix and not path.exists():
            near = get_close_matches(template.lower(), names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"data.template is {template!r}: {wanted}{hint}") from None
        raise ConfigError(f"data.template: cannot read {template}: {error}; {wanted}") from error
