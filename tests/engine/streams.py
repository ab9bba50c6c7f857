"""The text for checks of carried states, and the loop that they are compared with."""

from __future__ import annotations

import itertools
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional
from transformers import DynamicCache

from harness.data.contiguous import Contiguous
from harness.data.packing import Packed
from harness.data.pair import NO_MASKS, IndexedTokens, write_indexed
from harness.data.split import load_split, write_splits
from harness.models.transformers_releases import MAMBA2_CACHE
from tests.engine.small import SEQ_LEN, VOCAB_SIZE

MODEL: dict[str, Any] = {
    "model_type": "recurrent",
    "cell": "lstm",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "recurrent_size": 24,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
ROWS, WINDOWS, STEPS = 8, 3, 5
"""Rows of a batch; windows per row and epoch; steps, enough to begin a second epoch."""
# Three windows begin with a document, one of them a row's second; other documents begin within
# windows.
STARTS = (0, 30, 4 * SEQ_LEN, 100, 9 * SEQ_LEN, 15 * SEQ_LEN, 301)


@cache
def text() -> list[int]:
    tokens = ROWS * WINDOWS * SEQ_LEN + 1
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCAB_SIZE, (tokens,), generator=generator).tolist()


@cache
def stream(starts: tuple[int, ...] = STARTS) -> Contiguous:
    """Return the text, divided into documents."""
    folder, ids = Path(tempfile.mkdtemp()), text()
    ends = (*starts[1:], len(ids))
    documents = ((ids[a:b], True) for a, b in zip(starts, ends, strict=True))
    write_indexed(folder / "tokens", VOCAB_SIZE, documents)
    tokens = IndexedTokens(folder / "tokens")
    write_splits(folder, tokens, NO_MASKS, None, add_separator=False)
    options = {"seq_len": SEQ_LEN, "eos_id": 0, "vocab_size": VOCAB_SIZE, "add_separator": False}
    packed = Packed(tokens.ids, load_split(folder, "train"), NO_MASKS, **options)  # type: ignore[arg-type]
    return Contiguous(packed, ROWS)


MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "state_size": 8,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "num_hidden_layers": 2,
    "chunk_size": 8,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class TokenLoop:
    """The same model as a loop over tokens; it shares only the weights with the harness."""

    def __init__(self, weights: dict[str, torch.Tensor], cell: str) -> None:
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
        self.is_lstm = cell == "lstm"
        self.states: dict[int, Any] = {}

    def loss(self, step: int) -> torch.Tensor:
        """Return the mean loss of a step; its gradients end where its windows begin."""
        total = torch.zeros(())
        for row in range(ROWS):
            begin = (row * WINDOWS + step % WINDOWS) * SEQ_LEN
            if step % WINDOWS == 0 or begin in STARTS:
                self.states.pop(row, None)
            total = total + self._window(row, text()[begin : begin + SEQ_LEN + 1])
        return total / (ROWS * SEQ_LEN)

    def step(self, lr: float) -> None:
        for weight in self.weights.values():
            assert weight.grad is not None
            with torch.no_grad():
                weight -= lr * weight.grad
            weight.grad = None

    def _window(self, row: int, ids: list[int]) -> torch.Tensor:
        w = self.weights
        before = self.states.get(row) or [[torch.zeros(1, 24)] * 2 for _ in range(2)]
        states = [[part.detach() for part in layer] for layer in before]
        loss = torch.zeros(())
        for token, target in itertools.pairwise(ids):
            hidden = w["model.embed_tokens.weight"][token][None]
            for layer in range(2):
                hidden = hidden + self._layer(f"model.layers.{layer}.", hidden, states[layer])
            logits = self._norm("model.norm.", hidden) @ w["lm_head.weight"].T
            loss = loss + functional.cross_entropy(logits, torch.tensor([target]))
        self.states[row] = states
        return loss

    def _layer(self, name: str, hidden: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cell = [self.weights[f"{name}cell.{part}"] for part in parts]
        inputs = self._norm(f"{name}norm.", hidden)
        if self.is_lstm:
            state[:] = torch.lstm_cell(inputs, state, *cell)
        else:
            state[0] = torch.gru_cell(inputs, state[0], *cell)
        return state[0] @ self.weights[f"{name}out_proj.weight"].T

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}weight"], self.weights[f"{name}bias"]
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias)


class CacheLoop(TokenLoop):
    """A transformers model as a loop over rows, each with transformers' own cache."""

    def __init__(self, model: Any) -> None:
        super().__init__({name: w.detach() for name, w in model.named_parameters()}, "")
        self.model = model

    def _window(self, row: int, ids: list[int]) -> torch.Tensor:
        cache = self.states.setdefault(row, DynamicCache(config=self.model.config))
        for layer in cache.layers:
            for states in (layer.conv_states, layer.recurrent_states):
                states.update({k: v.detach().clone() for k, v in states.items() if v is not None})
        tokens = torch.tensor(ids)
        arguments = {"input_ids": tokens[None, :-1], MAMBA2_CACHE: cache, "use_cache": True}
        logits = functional_call(self.model, self.weights, (), arguments).logits[0]
        return functional.cross_entropy(logits, tokens[1:], reduction="sum")
