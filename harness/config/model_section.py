"""The run config's section of the model, with its adapters: keys, types, defaults, meanings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PlainValidator,
)
from pydantic_core import PydanticCustomError

from harness.config.sections import (
    MAX_COUNT,
    MAX_SAMPLES,
    Count,
    CountOrZero,
    PathText,
    Positive,
    Probability,
    Samples,
    Section,
    Text,
)
from harness.layout.adapters import Adapters, Kind, Quantization
from harness.layout.attention_table import ATTENTIONS
from harness.layout.recompute import WAYS, Checkpointing


def _checkpointing(value: object) -> object:
    if value in WAYS or (type(value) is int and 1 <= value <= MAX_COUNT):
        return value
    raise PydanticCustomError(
        "checkpointing", "it must be {ways}, or N for every N-th layer", {"ways": ", ".join(WAYS)}
    )


class LoraConfig(Section):
    """Adapters of low rank beside linear maps, whose own weights are frozen (arXiv 2106.09685)."""

    rank: Count | None = None
    """Rank of adapters beside the linear maps of the decoder layers, which alone are trained; None:
    no adapters. Needs model.init_from and the package peft."""
    alpha: Positive | None = None
    """Adapters add alpha / rank of their output; None: twice the rank."""
    dropout: Probability = 0.0
    """Dropout probability of the adapters' inputs."""
    targets: list[Text] = Field(default_factory=list)
    """Linear maps with adapters, by the last part of their names: ["q_proj", "v_proj"]; []: all."""
    modules_to_save: list[Text] = Field(default_factory=list)
    """Modules that are trained whole beside the adapters, and saved and exported with them, by the
    last part of their names: ["embed_tokens", "lm_head"]."""
    rslora: bool = False
    """Add alpha / sqrt(rank) of an adapter's output (arXiv 2312.03732)."""
    dora: bool = False
    """Learn the norms of the adapted weights' rows, too (DoRA, arXiv 2402.09353)."""
    quantize: Kind | None = None
    """4-bit type of the frozen weights of the decoder layers' linear maps, with a scale for each 64
    (QLoRA, arXiv 2305.14314): nf4, fp4; None: the run's precision. Needs ZeRO 0 to 2 and the
    package bitsandbytes."""
    double_quantize: bool = True
    """Hold the scales of quantized weights in 8 bits, too."""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters' parameters; None without adapters."""
        if self.rank is None:
            return None
        own = tuple(self.modules_to_save)
        return Adapters(self.rank, tuple(self.targets), self.dora, self.quantization, own)

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of frozen weights; None: they are not quantized."""
        return None if self.quantize is None else Quantization(self.quantize, self.double_quantize)


class ModelConfig(Section):
    """The decoder to train."""

    name: PathText = "tiny"
    """Shape of the model (no weights): a preset, a config.json, a folder with one, or a hub id."""
    init_from: PathText | None = None
    """Initial weights: a folder, a hub id, or a run of ours as RUN or RUN@STEP; None: random."""
    checkpointing: Annotated[Checkpointing, PlainValidator(_checkpointing)] = "none"
    """Activation checkpointing of decoder layers: none; selective: matrix products and attention
    are kept, and the rest is computed again; full; N: of every N-th layer in full."""
    activation_offload: bool = False
    """What checkpointed layers keep waits in host memory for the backward pass."""
    reversible: bool = False
    """Decoder layers with two streams, of which the backward pass computes the inputs from the
    outputs (arXiv 1707.04585): another function of the same weights. The export brings its code."""
    mlp_tiles: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Parts of a micro-batch's tokens that dense MLPs compute one after the other, each again in
    the backward pass; 1: all tokens at once."""
    attention: Literal["auto", *ATTENTIONS] = "auto"  # type: ignore[valid-type]
    """Attention implementation, by its Hugging Face name; varlen: within documents, without a mask;
    auto: the best that fits device, model and data, compared with sdpa as the run starts. Less than
    exact: longformer, strided, linformer, performer, reformer (docs/long_sequences.md)."""
    attention_window: Samples | None = None
    """Latest tokens that a token sees: longformer; the stride of strided; linformer's block; of
    reformer those of one bucket. Each size of attention: None: the kind's own default."""
    attention_global: Annotated[int, Field(ge=0, le=MAX_SAMPLES)] | None = None
    """First tokens of a document that all its tokens see: longformer."""
    attention_features: Annotated[int, Field(gt=0, le=65536)] | None = None
    """Random features: performer; summaries of a block, which divide it: linformer."""
    attention_buckets: Annotated[int, Field(gt=0, le=65536)] | None = None
    """Buckets that queries and keys are hashed to: reformer."""
    kernels: Literal["none", "liger"] = "none"
    """liger: fused RMSNorm, SwiGLU, and head with cross-entropy, from the package liger-kernel."""
    compile: bool = False
    """Compile every decoder layer (torch.compile); the first steps take minutes."""
    context: Count | None = None
    """Positions that rotary embeddings are extended to, to train on longer samples than before;
    None: those of the model config."""
    rope: Literal["yarn", "linear", "ntk"] = "yarn"
    """How model.context extends them: yarn (arXiv 2309.00071), linear (arXiv 2306.15595), or ntk, a
    larger rope_theta, as transformers' `dynamic` has it at that length."""
    loss_chunk: CountOrZero | None = None
    """Vocabulary entries whose logits the loss holds at a time, computed again in the backward
    pass; 0: all; None: all, unless a micro-batch's fp32 logits would exceed 1 GiB on a rank."""
    dropout: Probability | None = None
    """Every dropout probability of the model; None keeps those of the model config."""
    attention_dropout: Probability | None = None
    """Dropout probability of attention weights; None: the same as `dropout`."""
    embedding_dropout: Probability | None = None
    """Dropout probability of embeddings, in families that have one."""
    residual_dropout: Probability | None = None
    """Dropout probability of the residual branches, in families that have one."""
    stochastic_depth: Probability = 0.0
    """Probability that a training sample skips the last decoder layer; it rises linearly over the
    layers."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Adapters of low rank."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Hugging Face config keys to change, e.g. model.overrides.num_hidden_layers=2, or
    model.overrides.sliding_window=null."""

    @property
    def attention_sizes(self) -> dict[str, int]:
        """The sizes of the kind of attention; {} for exact attention, or "auto"."""
        row = ATTENTIONS.get(self.attention)
        if row is None:
            return {}
        own = {name: getattr(self, f"attention_{name}") for name in row.sizes}
        return {name: row.sizes[name] if size is None else size for name, size in own.items()}
