"""A run's own copy of its tokenizer and generation config, for later exports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harness.data.tokenizer import SENTENCEPIECE, SPACE, write_tokenizer
from harness.data.tokenizer_files import GENERATION


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files, with the SentencePiece model that it came from, if any.

    Converters to other formats (llama.cpp's) read the pieces' scores only from that file.
    """
    write_tokenizer(tokenizer, folder)
    source = getattr(tokenizer, "vocab_file", None)
    if source and Path(source).is_file() and not (folder / SENTENCEPIECE).exists():
        model = Path(source).read_bytes()
        if has_pieces_of(tokenizer, model):
            (folder / SENTENCEPIECE).write_bytes(model)


def save_generation(model: PreTrainedModel, folder: Path, parent: Path | None) -> None:
    """Write the generation config that came with a model's weights, if any, beside the tokenizer.

    `parent`: the same folder of the run whose checkpoint the weights come from.
    """
    config = getattr(model, "generation_config", None)
    if config is not None and not config._from_model_config:
        config.to_json_file(folder / GENERATION)
    elif parent is not None and (parent / GENERATION).is_file():
        shutil.copyfile(parent / GENERATION, folder / GENERATION)


def has_pieces_of(tokenizer: PreTrainedTokenizerBase, model: bytes) -> bool:
    """Return True if `model` is a SentencePiece model whose pieces have the tokenizer's ids."""
    proto: Any = sentencepiece_model  # its classes are made at run time
    try:
        pieces = proto.ModelProto.FromString(model).pieces
    except Exception:  # protobuf's DecodeError, whose module depends on its implementation
        return False
    ids = tokenizer.get_vocab()
    # A tokenizer trained here writes spaces as spaces, all others as SentencePiece's character.
    return bool(pieces) and all(
        number in (ids.get(piece.piece), ids.get(piece.piece.replace(SPACE, " ")))
        for number, piece in enumerate(pieces)
    )


def brings_code(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer's class came with its files: it needs trust_remote_code."""
    return type(tokenizer).__module__.startswith("transformers_modules.")
