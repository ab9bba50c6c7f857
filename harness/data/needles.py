"""Needle in a haystack: a key and its number hidden in held-out text, with a question for the
number at the end (arXiv 2307.03172).
"""

import random
import string
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from harness.data.batch import Batch
from harness.data.batches import Stream
from harness.data.packing import IGNORED

DEPTHS = (0, 25, 50, 75, 100)
"""Percentage of the text that precedes the needle."""
NEEDLE_TEXTS = 4 * len(DEPTHS)
"""Number of texts per length; consecutive texts cycle through DEPTHS."""


@dataclass(frozen=True)
class Needles(Batch):
    """Texts of one length whose only targets are the tokens of the numbers asked for."""

    depths: torch.Tensor = None  # type: ignore[assignment]
    """(micro_batch,) int64: index into DEPTHS of each text."""

    def buckets(self, buckets: int, length: int) -> torch.Tensor:
        """Return (micro_batch, seq_len) int64: for each token, the depth index of its text."""
        return self.depths[:, None].expand_as(self.labels)


def needles(
    stream: Stream, tokenizer: PreTrainedTokenizerBase, length: int, first: int, count: int
) -> Needles:
    """Return texts [first, first + count) of one length. Texts from NEEDLE_TEXTS on have no target.

    The result depends only on the stream, the tokenizer, the length and the index of each text.
    """
    texts = [_text(stream, tokenizer, length, number) for number in range(first, first + count)]
    ids = torch.tensor([ids for ids, _ in texts])  # (count, length + 1)
    labels = torch.full((count, length), IGNORED)
    for row, (_, answer) in enumerate(texts):
        if first + row < NEEDLE_TEXTS:
            labels[row, -answer:] = ids[row, -answer:]
    depths = torch.arange(first, first + count) % len(DEPTHS)
    return Needles(ids[:, :-1].contiguous(), labels, None, depths=depths)


def _text(
    stream: Stream, tokenizer: PreTrainedTokenizerBase, length: int, number: int
) -> tuple[list[int], int]:
    """Return the token ids of a text and the number of tokens at its end that are the answer."""

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    draw = random.Random(f"{length}:{number}")
    key = "".join(draw.choices(string.ascii_lowercase, k=6))
    asked = ids_of(f"\nThe number of {key} is")
    answer = ids_of(f" {draw.randrange(10**5, 10**6)}")
    needle = [*asked, *answer, *ids_of(".\n")]
    room = length + 1 - len(needle) - len(asked) - len(answer)
    text = _haystack(stream, room, number * -(-room // stream.seq_len))
    cut = len(text) * DEPTHS[number % len(DEPTHS)] // 100
    return [*text[:cut], *needle, *text[cut:], *asked, *answer], len(answer)


def _haystack(stream: Stream, tokens: int, first: int) -> list[int]:
    """Return the first `tokens` tokens of a stream's samples, starting at sample `first`."""
    ids = list[int]()
    while len(ids) < tokens:
        parts = [ids for ids, _ in stream.documents_of(first)]
        ids += np.concatenate(parts).tolist()
        first += 1
    return ids[:tokens]
