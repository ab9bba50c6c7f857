"""A small Llama over Python's documentation, which pages train while somebody waits."""

from functools import lru_cache

import torch

SEQ_LEN = 64
_CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


@lru_cache
def corpus() -> torch.Tensor:
    """Return 200,000 bytes of Python's documentation, as int64."""
    from pydoc_data.topics import topics

    text = "".join(page for _, page in sorted(topics.items()))[:200_000].encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(width: int) -> torch.Tensor:
    """Return every window of `width` bytes of the corpus, (windows, width); a view."""
    return corpus().unfold(0, width, 1)


def llama() -> torch.nn.Module:
    """Return the model in fp32, with the same weights at every call."""
    from transformers import AutoModelForCausalLM

    from harness.models.skeleton import hf_config

    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        hf_config(dict(_CONFIG), None), dtype=torch.float32
    )
    return model


def samples(count: int, draws: torch.Generator, seq_len: int = SEQ_LEN) -> torch.Tensor:
    """Return random samples (count, seq_len + 1): inputs and, shifted by one, targets."""
    every = windows(seq_len + 1)
    return every[torch.randint(len(every), (count,), generator=draws)]


def backward(model: torch.nn.Module, batch: torch.Tensor) -> float:
    """Add the gradient of a batch's mean loss by the loss of train.py; return the loss in nats."""
    from harness.models.loss import forward

    inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    summed, _ = forward(model, inputs, targets)
    loss = summed / targets.numel()
    loss.backward()
    return float(loss.detach())


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return every element of the gradient, (elements,), and forget it."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat
