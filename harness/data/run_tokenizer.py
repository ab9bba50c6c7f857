"""The tokenizer of a run: the user's, or one that is trained on the text of all sources."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from harness.config.data_section import DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE
from harness.data.cache import Report, build_once, cache_key, default_cache
from harness.data.prepare import FORMAT
from harness.data.rendering import set_template
from harness.data.spec import DataSpec, corpora_of
from harness.data.tokenizer import TRAINED_FORMAT, load_tokenizer, train_tokenizer, vocab_size
from harness.errors import ConfigError
from harness.files.corpus import Corpus, holds_ids
from harness.files.paths import user_path


def build_tokenizer(spec: DataSpec, report: Report) -> PreTrainedTokenizerBase:
    """Return the tokenizer for build_data; one process trains it if needed.

    Raises ConfigError for problems with the tokenizer or any source.
    """
    source: str | Path | None = spec.config.tokenizer
    corpora = corpora_of(spec)
    if source is None:
        source = _tokenizer_folder(corpora, spec)

        def build(path: Path) -> None:
            report("training a tokenizer")
            train_tokenizer(corpora, path, spec.config.vocab_size)

        build_once(source, build, report)
    return load_for(source, spec)


def cached_tokenizer(spec: DataSpec) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of build_tokenizer if it need not be trained, otherwise None.

    Raises ConfigError as build_tokenizer does.
    """
    corpora = corpora_of(spec)
    source = spec.config.tokenizer or _tokenizer_folder(corpora, spec)
    if isinstance(source, Path) and not source.is_dir():
        return None
    return load_for(source, spec)


def cache_of(spec: DataSpec) -> Path:
    """Return the cache folder of a run."""
    if spec.config.cache_dir:
        return user_path("data.cache_dir", spec.config.cache_dir)
    return default_cache()


def load_for(source: str | Path, spec: DataSpec) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises ConfigError if it has more ids than the model's vocabulary, unless
    rows may be added.
    """
    tokenizer = load_tokenizer(source, trust_remote_code=spec.trust_remote_code)
    if spec.config.template is not None:
        set_template(tokenizer, spec.config.template)
    ids = vocab_size(tokenizer)
    rows = spec.model_vocab_size
    if rows is not None and ids > rows and not spec.adds_rows:
        raise ConfigError(
            f"data.tokenizer: {source} has {ids} ids, but the model's vocabulary has {rows}: set "
            f"model.overrides.vocab_size={ids}{_or_fewer(spec, tokenizer)}"
        )
    return tokenizer


def _or_fewer(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the other remedy for a tokenizer trained here, a smaller vocabulary, if its characters
    alone would fit; otherwise "".
    """
    rows = spec.model_vocab_size or 0
    least = sum(len(piece) == 1 or piece.startswith("<") for piece in tokenizer.get_vocab())
    is_enough = not spec.config.tokenizer and rows >= max(least, MIN_VOCAB_SIZE)
    return f" or data.vocab_size={rows}" if is_enough else ""


def _tokenizer_folder(corpora: Sequence[Corpus], spec: DataSpec) -> Path:
    """Return the cache folder of a tokenizer trained on the text of all sources."""
    for corpus in corpora:
        if corpus.kind == "indexed":
            raise ConfigError(holds_ids(corpus.path))
    identities = [corpus.identity() for corpus in corpora]
    identity = identities[0] if len(corpora) == 1 else identities
    # The default size was once the only one: leaving it out keeps the cache keys of that time.
    pieces = spec.config.vocab_size
    size = {} if pieces == DEFAULT_VOCAB_SIZE else {"vocab_size": pieces}
    key = cache_key(format=FORMAT, trained=TRAINED_FORMAT, corpus=identity, **size)
    return cache_of(spec) / f"tokenizer-{key}"
