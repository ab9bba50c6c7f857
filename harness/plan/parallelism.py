"""Tensor, expert and sequence parallelism in a plan: checks that they can be combined, and that the
ranks can shard the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.config.assignments import flat
from harness.config.ds_json import DsJson, offloaded_to
from harness.layout.exclusions import incompatible_axes, sequence_problems
from harness.layout.expert import ExpertPlan
from harness.layout.families import SIZE_KEYS, family_of
from harness.layout.shape import Shape
from harness.layout.tensor import GROUPED, TensorPlan, tensor_problems
from harness.plan.attention import ATTENTION_DROPOUTS
from harness.plan.context import rope_types
from harness.plan.draft import Draft
from harness.plan.ranks import left_of

_TENSOR_KEY = "tensor_parallel.autotp_size"
WHOLE_MATRICES = "updates full matrices: use optim.name=adamw, or ZeRO 3 alone"
_SENT = ("pipeline.pipe_partitioned", "pipeline.grad_partitioned")


def whole_vocabulary(shape: Shape, places: int) -> str:
    """Return a clause saying that this many ranks cannot divide a vocabulary, with the next size
    that they can.
    """
    size = shape.vocab_size
    return (
        f"a vocabulary of {size:,} cannot be divided over {places} "
        f"(model.overrides.vocab_size={padded(size, places)} can)"
    )


def padded(vocab_size: int, places: int) -> int:
    """Return the smallest vocabulary of at least this size that the ranks can divide."""
    return -(-vocab_size // places) * places


def check_together(draft: Draft) -> None:
    """Reject axes that exclude pipeline stages, before other passes drop their keys."""
    grid, experts = draft.grid, asked_experts(draft.ds)
    if grid.data * grid.sequence % experts:  # divide_experts reports this
        grid = replace(grid, world_size=grid.world_size * experts)
    grid = replace(grid, expert=experts)
    shortest = draft.config.data.seq_len // draft.curriculum.most_pieces
    for key, why, use in incompatible_axes(draft.shape, grid, shortest):
        draft.refuse_layout(key, why, use)


def divide_tensors(draft: Draft) -> None:
    """Require that the tensor-parallel ranks can shard the model, and remove the key from the JSON,
    because DeepSpeed would shard it again.
    """
    places = draft.grid.tensor
    if places > 1:
        for why in _tensor_problems(draft, places):
            draft.refuse_layout(_TENSOR_KEY, why)
    draft.ds.drop("tensor_parallel")
    if places > 1 and draft.grid.pipeline > 1:
        _divide_sent(draft, places)


def _divide_sent(draft: Draft, places: int) -> None:
    """Make stages send whole hidden states if DeepSpeed cannot divide them evenly.

    By default each tensor-parallel rank sends its part, and the next stage's ranks combine them: a
    token's hidden states, and the router logits sent with them.
    """
    activations, gradients = (draft.ds.value(key) for key in _SENT)
    if activations != gradients:
        draft.problems.add(_SENT[0], f"{_SENT[1]} is not: give both the same value")
    config = draft.model_config
    sizes = [size for key in SIZE_KEYS["hidden"] if isinstance(size := config.get(key), int)]
    if config.get("output_router_logits"):
        sizes += [n for key in SIZE_KEYS["experts"] if isinstance(n := config.get(key), int)]
    if activations and any(size % places for size in sizes):
        for key in _SENT:
            draft.ds.set(key, False, f"{places} ranks cannot divide a token's states evenly")


def _tensor_problems(draft: Draft, places: int) -> Iterator[str]:
    run = draft.config
    if run.model.kernels != "none":
        yield f"it is not supported with model.kernels={run.model.kernels}: remove one of them"
    if run.optim.name in ("muon", "adafactor"):
        yield f"optim.name={run.optim.name} {WHOLE_MATRICES}"
    for key in (f"{_ZERO}.zero_hpz_partition_size", f"{_ZERO}.zero_quantized_gradients"):
        if draft.ds.value(key) != DsJson({}).value(key):  # of neighbours, whose slices differ
            yield f"it is not supported with {key}: remove that key"
    if draft.model_config.get("activation_dropout"):
        why = "would be identical in every rank's shard"
        yield f"activation_dropout {why}: set model.residual_dropout=0"
    slices = draft.model_config.get("pretraining_tp")
    if draft.model_config.get("slow_but_exact") and slices not in (None, 1):
        yield (
            f"slow_but_exact with pretraining_tp={slices} bypasses the modules of its weights: set "
            "model.overrides.slow_but_exact=false"
        )
    drawn = [key for key in ATTENTION_DROPOUTS if draft.model_config.get(key)]
    family = family_of(str(draft.model_config.get("model_type")))
    if drawn and GROUPED in family.tensor_plan.values():
        why = "is drawn by the model's own code, identically for every rank's heads"
        yield f"{drawn[0]} {why}: set model.attention_dropout=0"
    elif drawn and (run.model.compile or run.model.attention not in ("sdpa", "eager")):
        yield (
            f"{drawn[0]} needs model.compile=false and model.attention sdpa or eager: change "
            "these, or set model.attention_dropout=0"
        )
    if draft.shape is not None:
        ranks = left_of(draft.world, draft.grid, "pipeline", "sequence")
        problems = tensor_problems(draft.shape, places, ranks)
        yield from problems
        if problems and draft.shape.vocab_size % places:
            yield f"{whole_vocabulary(draft.shape, places)} and would be replicated on every rank"
    elif draft.model_config:
        try:
            yield from TensorPlan.of(draft.model_config).problems(places)
        except ValueError as error:
            yield str(error)


_SECTION = "expert_parallel"
_ENABLED, _SIZE = f"{_SECTION}.enabled", f"{_SECTION}.autoep_size"
_ZERO = "zero_optimization"
_AS_DEFAULT = [
    *("reduce_scatter", "contiguous_gradients", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_gradients"),
]


def divide_experts(draft: Draft) -> None:
    """Require that neighbouring data ranks can share the experts, and remove the section from the
    JSON, because DeepSpeed would replace the model's layers by its own.
    """
    ds, places = draft.ds, asked_experts(draft.ds)
    if places > 1:
        problems = [*_other_keys(ds), *((_SIZE, why) for why in _expert_problems(draft, places))]
        sizes = [(_SIZE, why) for why in _of_sizes(draft, places)]
        for key, why in [*sizes, *problems]:
            draft.refuse_layout(key, why)
        if not sizes and draft.grid.world_size == draft.world.world_size:
            draft.grid = replace(draft.grid, expert=places)
    ds.drop(_SECTION)


def asked_experts(ds: DsJson) -> int:
    """Return the number of ranks that share the experts; 1 if none do."""
    return max(1, ds.value(_SIZE)) if ds.value(_ENABLED) else 1


def _other_keys(ds: DsJson) -> Iterator[tuple[str, str]]:
    """Yield keys for the layers that DeepSpeed would build, if they differ from their defaults."""
    defaults = DsJson({})
    for key, _ in flat(ds.tree[_SECTION], f"{_SECTION}."):
        if key not in (_ENABLED, _SIZE) and ds.value(key) != defaults.value(key):
            yield key, "only DeepSpeed's own expert layers use it: remove it"
    key = "use_data_before_expert_parallelism"
    if ds.value(key):
        yield key, "experts are shared by neighbouring ranks: remove it"


def _of_sizes(draft: Draft, places: int) -> Iterator[str]:
    if not draft.model_config:
        return
    try:
        plan = ExpertPlan.of(draft.model_config)
    except ValueError as error:
        yield str(error)
        return
    problem = plan.problem(places, left_of(draft.world, draft.grid, "pipeline", "tensor"))
    if problem:
        yield problem


def _expert_problems(draft: Draft, places: int) -> Iterator[str]:
    run, ds, defaults = draft.config, draft.ds, DsJson({})
    if ds.value(f"{_ZERO}.stage") == 0:
        yield (
            f"{_ZERO}.stage=0 would clip by a mean of the ranks' gradient norms: use "
            "stage 1, 2 or 3"
        )
    for key in (f"{_ZERO}.{name}" for name in _AS_DEFAULT):
        if ds.value(key) != defaults.value(key):
            yield f"it is not supported with {key}: remove that key"
    if "nvme" in {offloaded_to(ds.tree, part) for part in ("optimizer", "param")}:
        yield f"it is not supported with states on NVMe: use {_ZERO}.offload_optimizer.device=cpu"
    if run.model.kernels != "none":
        yield f"it is not supported with model.kernels={run.model.kernels}: remove one of them"
    if run.model.compile:
        yield "it is not supported with model.compile: remove one of them"
    if run.optim.name in ("muon", "adafactor"):
        yield f"optim.name={run.optim.name} {WHOLE_MATRICES}"


_SEQUENCE_KEY = "sequence_parallel_size"


def divide_sequences(draft: Draft) -> None:
    """Require that the ranks can divide every row, and remove the key from the JSON, because
    DeepSpeed's own attention would ignore document boundaries.
    """
    if draft.grid.sequence > 1:
        for why in _sequence_problems(draft, draft.grid.sequence):
            draft.refuse_layout(_SEQUENCE_KEY, why)
    draft.ds.drop(_SEQUENCE_KEY)


def _sequence_problems(draft: Draft, places: int) -> Iterator[str]:
    run = draft.config
    if run.model.kernels != "none":
        yield f"it is not supported with model.kernels={run.model.kernels}: remove one of them"
    if run.model.stochastic_depth > 0:
        yield "its ranks would skip layers for different tokens (model.stochastic_depth): use 0"
    if by_length := rope_types(draft.model_config) & {"dynamic", "longrope"}:
        # transformers reads the length from the positions, and a rank has only some of them.
        yield f"rotary positions of type {', '.join(by_length)} depend on the length of a row"
    if draft.shape is not None:
        shortest = run.data.seq_len // draft.curriculum.most_pieces
        ranks = left_of(draft.world, draft.grid, "pipeline", "tensor")
        # Tensor parallelism reports heads that its ranks cannot divide.
        tensor = 1 if tensor_problems(draft.shape, draft.grid.tensor) else draft.grid.tensor
        key = "data.seq_len" if shortest == run.data.seq_len else "ramp.length_from"
        unit = f"tokens ({key})"
        yield from sequence_problems(draft.shape, places, shortest, tensor, ranks, unit)
    elif draft.model_config and not family_of(draft.model_config["model_type"]).divides_rows:
        # The first batch would not reveal an error: small states of a recurrent layer disappear in
        # rounding.
        yield f"sequence parallelism does not support {draft.model_config['model_type']}: use 1"
