"""A short text from the model, so that a person sees what was learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TEMPERATURE = 0.8


def sample_text(
    next_logits: Callable[[torch.Tensor], torch.Tensor],
    tokenizer: Any,
    prompt: str,
    tokens: int,
    seq_len: int,
    seed: int,
) -> str:
    """Continue `prompt` by up to `tokens` tokens, the same on every rank.

    `next_logits` maps ids (1, n) to logits (vocab_size,). The prefix is run again for each token:
    no cache, so it works under every layout, and the text is short.
    """
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits = next_logits(torch.tensor([ids[-seq_len:]])).cpu()[: len(tokenizer)]
        if not logits.isfinite().all():
            break
        choice = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
        if choice.item() == tokenizer.eos_token_id:
            break
        ids.append(int(choice))
    return str(tokenizer.decode(ids))
