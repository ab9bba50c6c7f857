"""Tokenizers: trained on the corpus, or opened by Hugging Face's AutoTokenizer."""

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from harness.errors import ConfigError, Unusable
from harness.files.corpus import Corpus
from harness.files.hub import hub_answers
from harness.files.paths import user_path
from harness.files.regular_file import read_json

# Increase this if the same corpus would give different files.
TRAINED_FORMAT = 2
SENTENCEPIECE = "tokenizer.model"  # the file name that readers expect
# Maximum pieces to tokenise at once.
PIECES_AT_ONCE = 256
# A larger corpus is sampled down to about this much text: the vocabulary converges with much less.
TRAINING_CHARS = 48_000_000
# Long enough that runs of line breaks become pieces, short enough for SentencePiece's buffers.
_SENTENCE_CHARS = 2000
SPACE = "\u2581"  # SentencePiece writes every space as this character
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
_OF_TOKENIZERS = re.compile(r"token|tekken|vocab|merges|spiece|sentencepiece|\.model$")


class NoTokenizer(ConfigError):
    """A tokenizer is not on this machine."""


def train_tokenizer(corpora: Sequence[Corpus], folder: Path, vocab_size: int) -> None:
    """Train a byte-pair vocabulary of at most `vocab_size` pieces on some corpora and write it as a
    Hugging Face tokenizer folder.

    Encoding is lossless: identity normalisation, byte fallback, every space kept, no prefix. The
    same text gives the same files. They include SentencePiece's own model, from which converters to
    other formats take the pieces' scores.
    """
    model = train_model(corpora, vocab_size)
    write_tokenizer(wrap(to_backend(model)), folder)
    (folder / SENTENCEPIECE).write_bytes(model)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face tokenizer folder. Raises OSError if the disk is full or read-only."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions for errors of its Rust code
        number = re.search(r"\(os error ([0-9]+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


def train_model(
    corpora: Sequence[Corpus], vocab_size: int, kind: str = "bpe", byte_fallback: bool = True
) -> bytes:
    """Return the SentencePiece model of train_tokenizer, or of another `kind` ("unigram").

    Raises ConfigError if there is no text, or if the characters alone exceed the vocabulary size.
    """
    try:
        return spm_model(training_sentences(corpora), kind, vocab_size, byte_fallback)
    except RuntimeError as error:
        if "smaller than required_chars" not in str(error):
            raise
        raise ConfigError(
            f"data.vocab_size is {vocab_size:,}: {_paths(corpora)} has more characters and bytes "
            "than that: increase it"
        ) from None


def spm_model(
    sentences: Iterable[str], kind: str, vocab_size: int, byte_fallback: bool = True
) -> bytes:
    """Return a SentencePiece model with the settings of train_tokenizer. Raises RuntimeError."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab_size,
        hard_vocab_limit=False,  # a small corpus has fewer pairs to merge
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=1 << 20,
        num_threads=1,
        minloglevel=3,
    )
    return model.getvalue()


def training_sentences(corpora: Sequence[Corpus]) -> list[str]:
    """Return the text of some corpora, or an even sample of it, in runs of whole lines.

    Raises ConfigError if there is none.
    """
    size = sum(corpus.num_bytes() for corpus in corpora if corpus.limit is None)
    keep_one_in = max(1, round(size / TRAINING_CHARS))
    pieces = (piece for corpus in corpora for piece in corpus.pieces())
    runs = (run for piece in pieces for run in _runs_of_lines(piece.text))
    kept = islice(runs, keep_one_in - 1, None, keep_one_in)
    # SentencePiece rejects NUL; byte fallback encodes it.
    sentences = [*filter(None, (run.replace("\0", "") for run in kept))]
    if not sentences:
        raise ConfigError(f"data.path: {_paths(corpora)} holds no text to train a tokenizer on")
    return sentences


def _paths(corpora: Sequence[Corpus]) -> str:
    return ", ".join(str(corpus.path) for corpus in corpora)


def _runs_of_lines(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + _SENTENCE_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def to_backend(model: bytes) -> Tokenizer:
    r"""Return a SentencePiece BPE model as a tokenizers pipeline that produces the same ids.

    SentencePiece merges the adjacent pair that forms the piece with the highest score. So the
    merges contain every way to split each piece in two, in order of score. Spaces stay spaces here,
    unlike in SentencePiece, to keep them distinct from a literal "\u2581" in the text.
    """
    proto: Any = sentencepiece_model  # its classes are created at run time
    pieces = proto.ModelProto.FromString(model).pieces
    normal = proto.ModelProto.SentencePiece.NORMAL
    vocab = {
        piece.piece.replace(SPACE, " ") if piece.type == normal else piece.piece: number
        for number, piece in enumerate(pieces)
    }
    assert len(vocab) == len(pieces), "two pieces became one"
    ranks = {text: n for text, n in vocab.items() if pieces[n].type == normal}
    merges = []
    for text in ranks:  # in the order of the scores
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    has_bytes = any(piece.type == proto.ModelProto.SentencePiece.BYTE for piece in pieces)
    backend = Tokenizer(BPE(vocab, merges, unk_token=UNK, byte_fallback=has_bytes))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the Hugging Face tokenizer. A "</s>" in a text is text, not an end of document."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


_GENERIC, _MOST_CONFIG_BYTES = ("PreTrainedTokenizerFast", "TokenizersBackend"), 1 << 24


def _is_generic(folder: Path) -> bool:
    """Return True if a folder names no class of its own for its tokenizer.json. AutoTokenizer takes
    the class of the model type all the same for some, such as qwen2 in transformers 5.
    """
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    try:
        table = read_json(config, _MOST_CONFIG_BYTES, links=True)
    except Unusable:  # AutoTokenizer says why
        return False
    return isinstance(table, dict) and table.get("tokenizer_class") in _GENERIC


def read_otherwise(folder: Path, *, trust_remote_code: bool = False) -> str:
    """Return the class with which AutoTokenizer gives other ids than load_tokenizer; "" if the ids
    are the same.
    """
    own = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    other = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=trust_remote_code, local_files_only=True
    )
    same = own(_PROBE)["input_ids"] == other(_PROBE)["input_ids"]
    return "" if same else type(other).__name__


_PROBE = "Two words, 12 345 na\u00efve \u4f60\u597d\n\n\tit's  x_1 <|end|> </s>"


def load_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or hub id. Raises ConfigError if it or its eos is missing."""
    if str(source).startswith("~"):  # anything else may be a hub id
        source = user_path("data.tokenizer", str(source))
    is_folder = Path(source).is_dir()
    if is_folder and not any(_OF_TOKENIZERS.search(path.name) for path in Path(source).iterdir()):
        raise NoTokenizer(
            f"data.tokenizer: {source} holds no tokenizer: set data.tokenizer to a folder that does"
        )
    offline = not (is_folder or hub_answers())
    try:
        kind = PreTrainedTokenizerFast if _is_generic(Path(source)) else AutoTokenizer
        tokenizer = kind.from_pretrained(
            str(source), trust_remote_code=trust_remote_code, local_files_only=offline
        )
        tokenizer("a", verbose=False)  # settings of a wrong type are noticed only here
    except Exception as error:  # transformers raises many classes for bad files
        is_path = str(source).startswith((".", "/")) or str(source).count("/") > 1
        if not is_folder and (offline or is_path):
            reached = ", and the hub cannot be reached from here" if offline else ""
            raise NoTokenizer(
                f"data.tokenizer is {str(source)!r}: there is no such folder, and it is not in "
                f"the hub's local cache{reached}: set data.tokenizer=FOLDER"
            ) from None
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"data.tokenizer: {source} cannot be opened as a tokenizer: {problem}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"data.tokenizer: {source} has no eos_token, which must separate the documents; "
            "set it in its tokenizer_config.json"
        )
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # The first call would remove them, and so change tokenizer_hash.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text without special tokens, as users of the export will get them."""
    if getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus:
        backend = tokenizer.backend_tokenizer
        # The fast variant skips character offsets, which take a third longer.
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    return ids


def encode_with_offsets(
    tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> list[tuple[list[int], NDArray[np.int64]]]:
    """Return the ids of each text without special tokens, and each token's (tokens, 2) span."""
    if not texts:
        return []
    encodings = tokenizer(
        texts,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    columns = zip(encodings["input_ids"], encodings["offset_mapping"], strict=True)
    return [(ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2)) for ids, offsets in columns]


def trims_spans(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer's post-processor excludes spaces from the spans of tokens."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    return "trim_offsets=True" in str(tokenizer.backend_tokenizer.post_processor)


def with_full_spans(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer for encode_with_offsets whose spans include the spaces of each token: a
    copy if the tokenizer trims them.
    """
    if not trims_spans(tokenizer):
        return tokenizer
    full = deepcopy(tokenizer)
    full.backend_tokenizer.post_processor = None  # it has no other use without special tokens
    return full


def added_at_begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer prepends to every text, such as a bos token."""
    plain, whole = (
        tokenizer("a", add_special_tokens=is_added, verbose=False).input_ids
        for is_added in (False, True)
    )
    places = range(len(whole) - len(plain) + 1)
    return next((whole[:at] for at in places if whole[at : at + len(plain)] == plain), [])


def joins_pieces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the ids of a text are the concatenated ids of its pieces; False for tokenizers
    that start every text with a space mark.
    """
    cuts = (("a", " word"), ("a\n", "b"))
    ids = encode(tokenizer, [text for first, last in cuts for text in (first, last, first + last)])
    return all(ids[at] + ids[at + 1] == ids[at + 2] for at in (0, 3))


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one. `len(tokenizer)` is smaller if the ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that identifies the tokenizer's encoding, independent of its folder."""
    parts: dict[str, Any] = {
        "vocab": sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        "eos": tokenizer.eos_token_id,
        "split_special_tokens": getattr(tokenizer, "split_special_tokens", False),
    }
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        parts["backend"] = json.loads(tokenizer.backend_tokenizer.to_str())
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
