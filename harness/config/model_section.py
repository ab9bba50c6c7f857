"""The run config's model section and its adapters: keys, types, defaults, meanings."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
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
    name_in,
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
    """Low-rank adapters on linear layers with frozen weights (arXiv 2106.09685)."""

    rank: Count | None = None
    """Rank of adapters on the linear layers of the decoder layers; only adapters are trained; None:
    no adapters. Needs model.init_from and the package peft."""
    alpha: Positive | None = None
    """Scales the adapters' output by alpha / rank; None: twice the rank."""
    dropout: Probability = 0.0
    """Dropout probability of the adapters' inputs."""
    targets: list[Text] = Field(default_factory=list)
    """Linear layers with adapters, by the last part of their names: ["q_proj", "v_proj"];
    []: all."""
    modules_to_save: list[Text] = Field(default_factory=list)
    """Modules to train in full, and to save and export with the adapters, by the last part of their
    names: ["embed_tokens", "lm_head"]."""
    rslora: bool = False
    """Scale the adapters' output by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    dora: bool = False
    """Also train the row norms of the adapted weights (DoRA, arXiv 2402.09353)."""
    quantize: Kind | None = None
    """4-bit type of the decoder layers' frozen linear weights: nf4 or fp4, with a scale per 64
    weights (QLoRA, arXiv 2305.14314); None: the run's precision. Needs ZeRO 0 to 2 and the package
    bitsandbytes."""
    double_quantize: bool = True
    """Also quantize the scales of quantized weights, to 8 bits."""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters' properties; None without adapters."""
        if self.rank is None:
            return None
        own = tuple(self.modules_to_save)
        return Adapters(self.rank, tuple(self.targets), self.dora, self.quantization, own)

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of the frozen weights; None if they are not quantized."""
        return None if self.quantize is None else Quantization(self.quantize, self.double_quantize)


class ModelConfig(Section):
    """The decoder to train."""

    name: PathText = "tiny"
    """Shape of the model, without weights: a preset, a config.json or its folder, or a hub id."""
    init_from: PathText | None = None
    """Initial weights: a folder, a hub id, or a run of this harness as RUN or RUN@STEP; None:
    random."""
    checkpointing: Annotated[Checkpointing, PlainValidator(_checkpointing)] = "none"
    """Activation checkpointing of decoder layers: none; selective: keep matrix products and
    attention, recompute the rest; full; N: full in every N-th layer."""
    activation_offload: bool = False
    """Offload the tensors that checkpointed layers keep for the backward pass to host memory."""
    reversible: bool = False
    """Reversible decoder layers with two streams: the backward pass computes their inputs from
    their outputs (arXiv 1707.04585). The function differs; the export includes its code."""
    mlp_tiles: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Number of parts in which dense MLPs process a micro-batch's tokens, recomputing each in the
    backward pass; 1: all tokens at once."""
    attention: Annotated[str, name_in(ATTENTIONS, "auto")] = "auto"
    """Attention implementation by its Hugging Face name; varlen: within documents, without a mask;
    auto: the best for device, model and data, checked against sdpa at the start. Approximations:
    longformer, strided, linformer, performer, reformer (docs/long_sequences.md). Or one of
    run.code."""
    attention_window: Samples | None = None
    """Number of latest tokens that a token attends to (longformer; reformer: within a bucket), the
    stride (strided) or the block length (linformer). None, here and in the next three keys: the
    implementation's default."""
    attention_global: Annotated[int, Field(ge=0, le=MAX_SAMPLES)] | None = None
    """Number of tokens at the start of a document that all its tokens attend to (longformer)."""
    attention_features: Annotated[int, Field(gt=0, le=65536)] | None = None
    """Random features (performer), or summaries per block, a divisor of the block (linformer)."""
    attention_buckets: Annotated[int, Field(gt=0, le=65536)] | None = None
    """Number of buckets that queries and keys are hashed into (reformer)."""
    kernels: Literal["auto", "none", "liger"] = "auto"
    """liger: fused RMSNorm, SwiGLU, and head with cross-entropy (package liger-kernel); auto: liger
    on GPUs, for families and layouts that it supports."""
    compile: bool | Literal["auto"] = "auto"
    """Compile every decoder layer (torch.compile); the first steps take minutes. auto: if that pays
    within the run, and liger is not used."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Multiply in float8 in the decoder layers' linear layers (package torchao), with a scale for
    each tensor, or for each row; on GPUs of compute capability 8.9 and up, emulated on a CPU."""
    context: Count | None = None
    """Positions to extend rotary embeddings to, for samples longer than the model was trained on;
    None: those of the model config."""
    rope: Literal["yarn", "linear", "ntk"] = "yarn"
    """Method of the extension: yarn (arXiv 2309.00071), linear (arXiv 2306.15595), or ntk, which
    raises rope_theta as transformers' `dynamic` does for that length."""
    loss_chunk: CountOrZero | None = None
    """Vocabulary entries per chunk of logits in the loss, recomputed in the backward pass; 0: all;
    None: all, unless a micro-batch's fp32 logits would exceed 1 GiB per rank."""
    dropout: Probability | None = None
    """Dropout probability everywhere in the model; None: those of the model config."""
    attention_dropout: Probability | None = None
    """Dropout probability of attention weights; None: as model.dropout."""
    embedding_dropout: Probability | None = None
    """Dropout probability of embeddings, in families that support it."""
    residual_dropout: Probability | None = None
    """Dropout probability of residual branches, in families that support it."""
    stochastic_depth: Probability = 0.0
    """Probability that a training sample skips the last decoder layer; it rises linearly over the
    layers."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Low-rank adapters."""
    init: Literal["config", "depth_scaled", "small"] = "config"
    """Standard deviations of initial linear layers and embeddings. config: those of the model's own
    code; depth_scaled: model.init_std, divided by sqrt(2 * layers) for outputs that are added to
    the residual stream, as in GPT-2; small: sqrt(2 / (5 * width)) (arXiv 1910.05895), for these
    outputs 2 / (layers * sqrt(width)), as in GPT-NeoX-20B (arXiv 2204.06745)."""
    init_std: Annotated[float, Field(gt=0, le=10)] | None = None
    """Standard deviation for config and depth_scaled; None: initializer_range of the model
    config."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Hugging Face config keys to change, e.g. model.overrides.num_hidden_layers=2 or
    model.overrides.sliding_window=null."""

    @property
    def attention_sizes(self) -> dict[str, int]:
        """Sizes of the chosen kind of attention; {} for exact attention and for "auto"."""
        row = ATTENTIONS.get(self.attention)
        if row is None:
            return {}
        own = {name: getattr(self, f"attention_{name}") for name in row.sizes}
        return {name: row.sizes[name] if size is None else size for name, size in own.items()}
