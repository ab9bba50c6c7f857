"""LSTM and GRU language models as Hugging Face decoders.

This file is self-contained because exports include a copy of it. A layer computes hidden +
project(cell(norm(hidden))); the cells are torch's own kernels.
"""

from __future__ import annotations  # exports are opened by older Pythons, too

from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

GATES = {"lstm": 4, "gru": 3}
State = tuple[torch.Tensor, ...]
"""(1, rows, recurrent_size) each: output and cell of an LSTM; output of a GRU."""


@strict
class RecurrentConfig(PreTrainedConfig):
    """Sizes of a recurrent language model. `recurrent_size`: size of a cell; None: hidden_size."""

    model_type = "recurrent"

    cell: str = "lstm"
    vocab_size: int = 32000
    hidden_size: int = 1024
    recurrent_size: int | None = None
    num_hidden_layers: int = 4
    hidden_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.cell not in GATES:
            raise ValueError(f"cell is {self.cell!r}: it must be one of {', '.join(GATES)}")
        self.recurrent_size = self.recurrent_size or self.hidden_size
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(layers, tensors per layer, recurrent_size) of one row's state."""
        assert self.recurrent_size is not None, "filled in by the config"
        return self.num_hidden_layers, 2 if self.cell == "lstm" else 1, self.recurrent_size


@dataclass
class Carried:
    """States of rows between two windows of text; (rows, *state_shape), without gradients."""

    before: torch.Tensor | None = None
    """States before this window; None: zeros."""
    behind: dict[int, torch.Tensor] = field(default_factory=dict)
    """States after this window by layer, once computed."""

    @property
    def after(self) -> torch.Tensor:
        """States after this window."""
        return torch.stack([self.behind[layer] for layer in range(len(self.behind))], dim=1)

    def of(self, layer: int) -> State | None:
        """Return a layer's state before this window."""
        if self.before is None:
            return None
        return tuple(part[None].contiguous() for part in self.before[:, layer].unbind(1))


class RecurrentCell(nn.Module):
    """One layer of an LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        assert config.recurrent_size is not None, "filled in by the config"
        self.kind, self.size = config.cell, config.recurrent_size
        rows = GATES[self.kind] * self.size
        self.weight_ih = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.weight_hh = nn.Parameter(torch.empty(rows, self.size))
        self.bias_ih = nn.Parameter(torch.empty(rows))
        self.bias_hh = nn.Parameter(torch.empty(rows))

    def forward(
        self, inputs: torch.Tensor, before: State | None = None
    ) -> tuple[torch.Tensor, State]:
        """(rows, tokens, hidden_size) -> (rows, tokens, recurrent_size), and the final state."""
        if before is None:
            zeros = inputs.new_zeros(1, inputs.shape[0], self.size)
            before = (zeros, zeros) if self.kind == "lstm" else (zeros,)
        weights = [self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh]
        how: Any = (weights, True, 1, 0.0, self.training, False, True)
        state: Any = before if self.kind == "lstm" else before[0]
        output, *after = (torch.lstm if self.kind == "lstm" else torch.gru)(inputs, state, *how)
        return output.contiguous(), tuple(after)


class RecurrentLayer(GradientCheckpointingLayer):
    """A cell between a norm and a projection, with a residual connection."""

    def __init__(self, config: RecurrentConfig, index: int) -> None:
        super().__init__()
        self.index, self.dropout = index, config.hidden_dropout
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.cell = RecurrentCell(config)
        self.out_proj = nn.Linear(self.cell.size, config.hidden_size, bias=False)

    def forward(
        self, hidden: torch.Tensor, carried: Carried | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """(rows, tokens, hidden_size) -> the same; records its state in `carried`."""
        before = None if carried is None else carried.of(self.index)
        output, after = self.cell(self.norm(hidden), before)
        if carried is not None:
            carried.behind[self.index] = torch.cat(after).detach().transpose(0, 1)
        return hidden + functional.dropout(self.out_proj(output), self.dropout, self.training)


class RecurrentPreTrainedModel(PreTrainedModel):
    """The attributes that transformers requires of a family."""

    config_class = RecurrentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # no attention, so any implementation will do
    _no_split_modules = ["RecurrentLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw cells uniformly as torch does, and the rest from a normal distribution."""
        if isinstance(module, RecurrentCell):
            bound = module.size**-0.5
            for parameter in module.parameters(recurse=False):
                nn.init.uniform_(parameter, -bound, bound)
            if module.kind == "lstm":  # Jozefowicz et al. 2015: start by remembering
                module.bias_ih[module.size : 2 * module.size] = 1.0
                module.bias_hh[module.size : 2 * module.size] = 0.0
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)


class RecurrentModel(RecurrentPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            RecurrentLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self, input_ids: torch.Tensor, carried: Carried | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """(rows, tokens) ids -> hidden states (rows, tokens, hidden_size)."""
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, carried=carried)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class RecurrentForCausalLM(RecurrentPreTrainedModel, GenerationMixin):
    """A language model: RecurrentModel with a head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.model = RecurrentModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        carried: Carried | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """(rows, tokens) ids -> logits (rows, tokens, vocab_size), and the mean loss of `labels`,
        which are the ids, or -100.

        Raises ValueError for a mask that hides tokens, since the state passes through all of them.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("a recurrent model also reads padding: use rows of equal length")
        hidden = self.model(input_ids, carried=carried).last_hidden_state
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole text for every new token: there is no cache."""
        return {"input_ids": input_ids, "attention_mask": kwargs.get("attention_mask")}


def register() -> None:
    """Register the model with transformers' Auto classes. Exports include this file; without the
    harness they open with trust_remote_code.
    """
    AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig, exist_ok=True)
    AutoModelForCausalLM.register(RecurrentConfig, RecurrentForCausalLM, exist_ok=True)
    RecurrentConfig.register_for_auto_class()  # type: ignore[no-untyped-call]
    RecurrentForCausalLM.register_for_auto_class("AutoModelForCausalLM")  # type: ignore[no-untyped-call]
