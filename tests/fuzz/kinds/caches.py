"""The cache of tokenised corpora: damaged, or in a place that cannot hold one."""

from __future__ import annotations

import random

from tests.fuzz.case import Case, Place
from tests.fuzz.files import replace_file, spoil_file

_PLACES = (
    *("/dev/null", "/dev/null/x", "/proc/nowhere", "secret.txt", "secret.txt/x", "c" * 300),
    *("~nosuchuser/x", "a/" * 3000, "\udcff", "new cache", "a\nb", "/sys/x", "/dev/full"),
)


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """The base's cache, of which a file is spoiled, or another place for it."""
    words = place.training()
    if valid:
        return Case(words, "valid", valid=True)
    cache = place.folder / "cache"
    way = draw.randrange(8)
    if way < 5:
        path = draw.choice([file for file in sorted(cache.rglob("*")) if file.is_file()])
        note = spoil_file(draw, path)
    elif way == 5:
        path = draw.choice(sorted(cache.iterdir()))
        note = f"{path.name}: {replace_file(draw, path)}"
    elif way == 6:
        note = f"the cache: {replace_file(draw, cache)}"
    else:
        place.secret()
        where = draw.choice(_PLACES)
        words, note = [*words, f"data.cache_dir={where}"], f"data.cache_dir={where[:30]!r}"
    return Case(words, note)
