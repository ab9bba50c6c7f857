"""Tools that prepare data: what is wrong with a corpus, a recipe or an argument."""

from __future__ import annotations

import random

from tests.fuzz.case import Case, Place
from tests.fuzz.kinds import corpora
from tests.fuzz.kinds.words import spoiled_word
from tests.fuzz.trees import spoil_text
from tests.two_ranks import REPOSITORY

_PLAIN = ("text", "JSON lines", "compressed")
_RECIPES = REPOSITORY / "tools/cleaning/recipes"
_WRONG: dict[str, tuple[str, ...]] = {
    "tools.tokenize_data": (
        *("--workers=0", "--workers=x", "--task=3", "--tasks=0", "--out=nowhere/x", "--bogus"),
        *("--out=", "--out=/dev/null/x", "--config=nowhere.toml", "data.path=nowhere", "x"),
    ),
    "tools.clean_data": (
        *("--workers=0", "--recipe=nowhere", "--recipe=", "--recipe=secret.txt", "--bogus"),
        *("language.keep=x", "url=1", "x.y=1", "near_duplicates.buckets=-1", "bad_words.file=x"),
    ),
    "tools.train_tokenizer": (
        *(
            "--vocab-size=1",
            "--vocab-size=x",
            "--vocab-size=99999999999",
            "--vocab-size=16777216",
            "--kind=x",
            "--bogus",
        ),
        *("--text=nowhere", "--text="),
    ),
}


def make(draw: random.Random, place: Place, valid: bool) -> Case:
    """A tool on data that may be spoiled, or with a spoiled argument or recipe."""
    main = draw.choice([*_WRONG])
    spoils_data = not valid and draw.randrange(2) == 0
    shapes = [*corpora.SHAPES] if spoils_data else [*_PLAIN]
    shape = draw.choice(shapes)
    path, note = corpora.SHAPES[shape](draw, place, not spoils_data)
    if path == "secret.txt":  # who names a file wants what it holds
        path, note = "nowhere", "a path to nothing"
    if main == "tools.tokenize_data":
        if not (place.folder / "cache").exists():
            place.copied(place.base.cache)
        words = [f"data.path={path}", f"data.tokenizer={place.base.tokenizer}", "--workers=1"]
        words += [f"data.cache_dir={place.folder / 'cache'}"]
        words += draw.choice(([], [f"--out={place.folder / 'cache' / 'pair'}"]))
    elif main == "tools.clean_data":
        words = [str(path), str(place.folder / "cleaned"), "--workers=1", "--recipe=light"]
    else:
        words = [str(path), str(place.folder / "new-tokenizer"), "--vocab-size=300"]
    if not (valid or spoils_data):
        place.secret()
        way = draw.randrange(3)
        if way == 0 and main == "tools.clean_data":
            text = draw.choice([*_RECIPES.glob("*.toml")]).read_text()
            data, note = spoil_text(draw, text)
            (place.folder / "recipe.toml").write_bytes(data)
            words[-1] = f"--recipe={place.folder / 'recipe.toml'}"
        else:
            argument = draw.choice(_WRONG[main]) if way else spoiled_word(draw)
            words.append(argument)
            note = ascii(argument)[:100]
    return Case(words, f"{main}, {shape}: {note}", main=main, valid=valid)
