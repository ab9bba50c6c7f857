"""The kinds of tokenizers that train_tokenizer.py trains."""

from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer

from harness.data.tokenizer import (
    BOS,
    EOS,
    SENTENCEPIECE,
    SPACE,
    UNK,
    to_backend,
    train_model,
    training_sentences,
    wrap,
    write_tokenizer,
)
from harness.files.corpus import Corpus


def train(kind: str, corpus: Corpus, folder: Path, vocab_size: int, byte_fallback: bool) -> None:
    """Train a tokenizer and write a Hugging Face folder. Raises ConfigError and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "byte_bpe":
        write_tokenizer(wrap(_byte_bpe(corpus, vocab_size)), folder)
        return
    model = train_model([corpus], vocab_size, kind, byte_fallback)
    backend = to_backend(model) if kind == "bpe" else to_unigram_backend(model)
    write_tokenizer(wrap(backend), folder)
    (folder / SENTENCEPIECE).write_bytes(model)


def to_unigram_backend(model: bytes) -> Tokenizer:
    """Return a SentencePiece unigram model as a tokenizers pipeline in which spaces stay spaces."""
    proto: Any = sentencepiece_model
    pieces = proto.ModelProto.FromString(model).pieces
    of_type = proto.ModelProto.SentencePiece
    lowest = min(piece.score for piece in pieces)
    vocab = []
    for piece in pieces:
        is_normal = piece.type == of_type.NORMAL
        text = piece.piece.replace(SPACE, " ") if is_normal else piece.piece
        vocab.append((text, piece.score if is_normal else lowest))
    unknown = next(n for n, piece in enumerate(pieces) if piece.type == of_type.UNKNOWN)
    has_bytes = any(piece.type == of_type.BYTE for piece in pieces)
    backend = Tokenizer(Unigram(vocab, unk_id=unknown, byte_fallback=has_bytes))
    # Text that spells a special token or a byte token is split inside it, so that it stays text.
    spelled = Regex(r"<(?=0x[0-9A-F]{2}>|/?s>|unk>)")
    backend.pre_tokenizer = pre_tokenizers.Split(spelled, "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _byte_bpe(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with GPT-2's text splitting, in the library tokenizers."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[UNK, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(training_sentences([corpus]), trainer)
    return backend
