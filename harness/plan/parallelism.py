"""Divides ranks and batches over the axes of a plan, and checks that the axes can be combined and
that the ranks can shard the model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from harness.config.assignments import flat
from harness.config.batch import BatchSizes
from harness.config.ds_json import AUTO, DsJson, default_of, literal, offloaded_to, value_of
from harness.estimate.timeline import rank_timeline
from harness.layout.exclusions import KEYS, incompatible_axes, sequence_problems
from harness.layout.expert import ExpertPlan
from harness.layout.families import SIZE_KEYS, family_of, given_size
from harness.layout.grid import Axis, Coords, Grid
from harness.layout.recompute import REVERSIBLE, is_checkpointed
from harness.layout.shape import Shape
from harness.layout.stages import Bounds, balanced, bounds_of, bubble, split, split_evenly
from harness.layout.tensor import GROUPED, TensorPlan, tensor_problems, whole_stream
from harness.plan.attention import ATTENTION_DROPOUTS
from harness.plan.memory import memory_inputs
from harness.plan.plan import Draft, Plan
from harness.plan.rotary import rope_types

_ZERO = "zero_optimization"
_TENSORS = "tensor_parallel"
_RESIDUALS = f"{_TENSORS}.sequence_parallel"
_SECONDARY = f"{_ZERO}.zero_hpz_partition_size"
_SENT = ("pipeline.pipe_partitioned", "pipeline.grad_partitioned")
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_DIVIDED = ("train.global_batch", "train.micro_batch", "ramp.batch_from", "ramp.batch_step")


def divide_ranks(draft: Draft) -> None:
    """Divide the ranks over the axes. If they do not divide, continue with the number of ranks that
    one model replica needs, so that later passes can report other problems.
    """
    ds, ranks = draft.ds, draft.world.world_size
    axes = {
        "pipeline": num_stages(ds.tree),
        **{axis: max(1, ds.value(KEYS[axis])) for axis in ("tensor", "sequence")},  # 0 means off
    }
    try:
        draft.grid = Grid(ranks, **axes)
    except ValueError as error:
        origins = draft.origins(KEYS[axis] for axis, size in axes.items() if size > 1)
        draft.problems.say(f"{error} ({origins})")
        draft.grid = Grid(prod(axes.values()), **axes)


def _left_of(draft: Draft, *axes: Axis) -> int:
    """Return the number of ranks that `axes` leave for the other axes; all ranks if the sizes of
    `axes` do not divide them.
    """
    ranks = draft.world.world_size
    left, rest = divmod(ranks, prod(getattr(draft.grid, axis) for axis in axes))
    return ranks if rest else left


def check_secondary(draft: Draft) -> None:
    """Require that the ranks can share a second copy of the weights (ZeRO++'s hpZ)."""
    ranks = draft.world.world_size
    size = min(draft.ds.value(_SECONDARY), ranks)
    if size < 1 or ranks % size:
        use = f'use "auto" for the {draft.world.local_world_size} ranks of a node'
        draft.problems.add(_SECONDARY, f"which does not divide {ranks} ranks", use)


def divide_batch(draft: Draft) -> None:
    """Split a step's samples into micro-batches for the data ranks."""
    # A value of the wrong type is already reported; its default is not the user's choice.
    if draft.ds.rejected.intersection(_BATCH_KEYS):
        return
    train = draft.config.train
    accum = draft.ds.literal("gradient_accumulation_steps")
    try:
        draft.batch = BatchSizes.divided(
            train.global_batch, draft.grid.data, train.micro_batch, accum, draft.curriculum.quantum
        )
    except ValueError as error:
        origins = draft.origins(key for key in _DIVIDED if key in str(error))
        draft.problems.say(f"{error} ({origins})")


def note_nodes(draft: Draft) -> None:
    """Note each axis whose groups of ranks span nodes, and ZeRO 3 on a single GPU."""
    grid, local = draft.grid, draft.world.local_world_size
    alone = grid.world_size == 1 and draft.world.accelerator == "cuda"
    if (
        alone
        and offloaded_to(draft.ds.tree, "param") == "none"
        and draft.ds.value(f"{_ZERO}.stage") == 3
    ):
        draft.note(
            "alone",
            "ZeRO 3 saves no memory on one GPU, and steps took a quarter longer than with "
            "ZeRO 1: set ds.zero_optimization.stage=1",
        )
    if local >= grid.world_size:
        return
    # Ranks per group, and the stride between consecutive ranks of a group.
    groups = {
        "tensor": (grid.tensor, 1),
        "sequence": (grid.sequence, grid.tensor),
        "expert": (grid.expert, grid.tensor),
    }
    for axis, (size, apart) in groups.items():
        if size > 1 and local % (size * apart):
            within = [n for n in range(1, size) if not (size % n or local % (n * apart))]
            fewer = f"; {within[-1]} would be" if within else ""
            draft.note(
                "across_nodes",
                f"{KEYS[axis]} is {size}: {size * apart} neighbouring ranks exchange data in every "
                f"layer, and are not all within one node of {local}{fewer}",
            )


def whole_vocabulary(shape: Shape, places: int) -> str:
    """Return the clause of a message which says that `places` ranks cannot divide the vocabulary,
    and names the next size that they can.
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
    grid, experts = draft.grid, _asked_experts(draft.ds)
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
            draft.refuse_layout(KEYS["tensor"], why)
    for key, why in _other_tensor_keys(draft.ds, places):
        draft.refuse_layout(key, why)
    asked = draft.ds.value(_RESIDUALS)
    if why := _why_whole(draft, places):
        if asked:
            draft.refuse_layout(_RESIDUALS, why)
    else:
        draft.divides_residuals = asked is not False
    draft.ds.drop(_TENSORS)
    if places > 1 and draft.grid.pipeline > 1:
        _divide_sent(draft, places)


def _other_tensor_keys(ds: DsJson, places: int) -> Iterator[tuple[str, str]]:
    """Yield each rejected key of the section, with the reason; tp.tp_size only if it differs from
    `places`.
    """
    section = ds.tree.get(_TENSORS, {})
    for name in (*section, *(f"tp.{inner}" for inner in section.get("tp", {}))):
        key = f"{_TENSORS}.{name}"
        value = ds.literal(key)
        if name == "tp" or key in (KEYS["tensor"], _RESIDUALS) or value in (None, default_of(key)):
            continue
        if name != "tp.tp_size":
            yield key, "only DeepSpeed's own tensor parallelism uses it: remove it"
        elif max(1, value) != places:
            yield key, f"{KEYS['tensor']} sets the number of ranks: set {KEYS['tensor']}={value}"


def _why_whole(draft: Draft, places: int) -> str:
    """Return why tensor-parallel ranks cannot divide the residual stream; "" if they can."""
    if places == 1:
        return "there are no tensor-parallel ranks: remove it"
    tokens = draft.config.data.seq_len // draft.grid.sequence
    is_reversible = bool(draft.model_config.get(REVERSIBLE))
    return whole_stream(draft.shape, tokens, places, draft.config.model.mlp_tiles, is_reversible)


def _divide_sent(draft: Draft, places: int) -> None:
    """Make stages send whole hidden states if DeepSpeed cannot divide them evenly.

    By default each tensor-parallel rank sends its part of a token's hidden states, and of the
    router logits sent with them; the next stage's ranks put the parts together.
    """
    activations, gradients = (draft.ds.value(key) for key in _SENT)
    if activations != gradients:
        draft.problems.add(_SENT[0], f"{_SENT[1]} is not: give both the same value")
    config = draft.model_config
    keys = SIZE_KEYS["hidden"]
    if config.get("output_router_logits"):
        keys += SIZE_KEYS["experts"]
    sizes = [size for key in keys if isinstance(size := config.get(key), int)]
    if activations and any(size % places for size in sizes):
        for key in _SENT:
            draft.ds.set(key, False, f"{places} ranks cannot divide a token's states evenly")


def _unsupported(draft: Draft, *names: str) -> Iterator[str]:
    """Yield why a setting excludes both tensor and expert parallelism. `names`: keys of the JSON's
    ZeRO section that must have their defaults.
    """
    model, optimizer = draft.config.model, draft.config.optim.name
    if model.kernels != "none":
        yield f"it is not supported with model.kernels={model.kernels}: remove one of them"
    if optimizer in ("muon", "adafactor"):
        why = "updates full matrices: use optim.name=adamw, or ZeRO 3 alone"
        yield f"optim.name={optimizer} {why}"
    for key in (f"{_ZERO}.{name}" for name in names):
        if draft.ds.value(key) != default_of(key):
            yield f"it is not supported with {key}: remove that key"


def _tensor_problems(draft: Draft, places: int) -> Iterator[str]:
    run, config, shape = draft.config, draft.model_config, draft.shape
    # These two concern neighbouring ranks, whose slices differ.
    yield from _unsupported(draft, "zero_hpz_partition_size", "zero_quantized_gradients")
    if config.get("activation_dropout"):
        why = "would be identical in every rank's shard"
        yield f"activation_dropout {why}: set model.residual_dropout=0"
    slices = config.get("pretraining_tp")
    if config.get("slow_but_exact") and slices not in (None, 1):
        yield (
            f"slow_but_exact with pretraining_tp={slices} bypasses the modules of its weights: set "
            "model.overrides.slow_but_exact=false"
        )
    drawn = [key for key in ATTENTION_DROPOUTS if config.get(key)]
    family = family_of(str(config.get("model_type")))
    if drawn and GROUPED in family.tensor_plan.values():
        why = "is drawn by the model's own code, identically for every rank's heads"
        yield f"{drawn[0]} {why}: set model.attention_dropout=0"
    elif drawn and (run.model.compile or run.model.attention not in ("sdpa", "eager")):
        yield (
            f"{drawn[0]} needs model.compile=false and model.attention sdpa or eager: change "
            "these, or set model.attention_dropout=0"
        )
    if shape is not None:
        problems = tensor_problems(shape, places, _left_of(draft, "pipeline", "sequence"))
        yield from problems
        if problems and shape.vocab_size % places:
            yield f"{whole_vocabulary(shape, places)} and would be replicated on every rank"
    elif config:
        try:
            yield from TensorPlan.of(config).problems(places)
        except ValueError as error:
            yield str(error)


_EXPERTS, _ENABLED, _SIZE = "expert_parallel", "expert_parallel.enabled", KEYS["expert"]
_OF_EXPERTS = (
    *("reduce_scatter", "contiguous_gradients", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_gradients"),
)


def divide_experts(draft: Draft) -> None:
    """Require that neighbouring data ranks can share the experts, and remove the section from the
    JSON, because DeepSpeed would replace the model's layers by its own.
    """
    places = _asked_experts(draft.ds)
    if places > 1:
        of_size = _problem_of_size(draft, places)
        if of_size:
            draft.refuse_layout(_SIZE, of_size)
        elif draft.grid.world_size == draft.world.world_size:
            draft.grid = replace(draft.grid, expert=places)
        for key, why in _expert_problems(draft):
            draft.refuse_layout(key, why)
    draft.ds.drop(_EXPERTS)


def _asked_experts(ds: DsJson) -> int:
    """Return the number of ranks that share the experts; 1 if none do."""
    return max(1, ds.value(_SIZE)) if ds.value(_ENABLED) else 1


def _problem_of_size(draft: Draft, places: int) -> str | None:
    if not draft.model_config:
        return None
    try:
        plan = ExpertPlan.of(draft.model_config)
    except ValueError as error:
        return str(error)
    return plan.problem(places, _left_of(draft, "pipeline", "tensor"))


def _expert_problems(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yield each key and why it excludes expert parallelism."""
    ds = draft.ds
    for key, _ in flat(ds.tree[_EXPERTS], f"{_EXPERTS}."):
        if key not in (_ENABLED, _SIZE) and ds.value(key) != default_of(key):
            yield key, "only DeepSpeed's own expert layers use it: remove it"
    key = "use_data_before_expert_parallelism"
    if ds.value(key):
        yield key, "experts are shared by neighbouring ranks: remove it"
    if ds.value(f"{_ZERO}.stage") == 0:
        why = "would clip by a mean of the ranks' gradient norms"
        yield _SIZE, f"{_ZERO}.stage=0 {why}: use stage 1, 2 or 3"
    if "nvme" in {offloaded_to(ds.tree, part) for part in ("optimizer", "param")}:
        why = "it is not supported with states on NVMe"
        yield _SIZE, f"{why}: use {_ZERO}.offload_optimizer.device=cpu"
    if draft.config.model.compile:
        yield _SIZE, "it is not supported with model.compile: remove one of them"
    for why in _unsupported(draft, *_OF_EXPERTS):
        yield _SIZE, why


def divide_sequences(draft: Draft) -> None:
    """Require that the ranks can divide every row, and remove the key from the JSON, because
    DeepSpeed's own attention would ignore document boundaries.
    """
    if draft.grid.sequence > 1:
        for why in _sequence_problems(draft, draft.grid.sequence):
            draft.refuse_layout(KEYS["sequence"], why)
    draft.ds.drop(KEYS["sequence"])


def _sequence_problems(draft: Draft, places: int) -> Iterator[str]:
    run, model_type = draft.config, draft.model_config.get("model_type")
    if run.model.kernels != "none":
        yield f"it is not supported with model.kernels={run.model.kernels}: remove one of them"
    if run.model.stochastic_depth > 0:
        yield "its ranks would skip layers for different tokens (model.stochastic_depth): use 0"
    if by_length := rope_types(draft.model_config) & {"dynamic", "longrope"}:
        # transformers reads the length from the positions, and a rank has only some of them.
        yield f"rotary positions of type {', '.join(by_length)} depend on the length of a row"
    if draft.shape is not None:
        shortest = run.data.seq_len // draft.curriculum.most_pieces
        # Tensor parallelism reports heads that its ranks cannot divide.
        tensor = 1 if tensor_problems(draft.shape, draft.grid.tensor) else draft.grid.tensor
        key = "data.seq_len" if shortest == run.data.seq_len else "ramp.length_from"
        ranks, unit = _left_of(draft, "pipeline", "tensor"), f"tokens ({key})"
        yield from sequence_problems(draft.shape, places, shortest, tensor, ranks, unit)
    elif draft.model_config and not family_of(str(model_type)).divides_rows:
        # layout.verify would not reveal an error, because it compares the first batch: the small
        # states of a recurrent layer disappear in rounding.
        yield f"sequence parallelism does not support {model_type}: use 1"


_STAGES, _PARTITION = KEYS["pipeline"], "pipeline.partition"
_BALANCES = ("time", "memory", "best")  # "best" is DeepSpeed's default and means "time"


def num_stages(ds: Mapping[str, Any]) -> int:
    """Return the number of pipeline stages in the JSON; 1 if it sets none."""
    stages = value_of(ds, _STAGES)
    return max(1, stages) if isinstance(stages, int) else 1


def split_stages(draft: Draft) -> None:
    """Divide the model's units among the stages; see `by_memory` for balancing by memory."""
    ds, problems = draft.ds, draft.problems
    stages, partition = ds.value(_STAGES), ds.value(_PARTITION)
    if not isinstance(stages, int) and stages != AUTO:
        problems.add(_STAGES, "it must be an integer")
    elif not isinstance(partition, list) and partition not in _BALANCES:
        why = 'it must be "time", "memory" or decoder layers per stage, as in [9, 7]'
        problems.add(_PARTITION, why)
    elif draft.model_config and (draft.grid.pipeline > 1 or isinstance(partition, list)):
        draft.stages = _bounds(draft, partition)


def note_pipeline(draft: Draft) -> None:
    """Note choices that the user may not have intended."""
    stages = draft.grid.pipeline
    is_explicit = isinstance(draft.ds.value(_PARTITION), list)
    if stages > 1 and draft.shape is None and not is_explicit:
        message = (
            "decoder layers are split evenly over the pipeline stages because their costs "
            "are unknown"
        )
        draft.note("even_split", message)
    if draft.batch:
        accum = draft.batch.grad_accum
    if draft.batch and accum < stages:
        message = (
            f"{stages} pipeline stages wait {bubble(stages, accum):.0%} of each step with {accum} "
            "micro-batches per step: for more of them lower train.micro_batch or raise "
            "train.global_batch"
        )
        draft.note("pipeline_bubble", message)


def by_memory(plan: Plan) -> Plan:
    """Return the plan with stages balanced by memory, if requested and if memory can be counted.

    This minimises the highest peak over the ranks.
    """
    inputs = memory_inputs(plan)
    if plan.stages is None or inputs is None or literal(plan.deepspeed, _PARTITION) != "memory":
        return plan
    stages, units = plan.grid.pipeline, inputs.shape.body.units
    windows = inputs.shape.sliding_windows
    peaks: dict[Any, int] = {}

    def peak(stage: int, begin: int, end: int) -> int:
        """Return the stage's peak in bytes; identical layers are counted once."""
        first = max(begin, 1) - 1
        kept = tuple(is_checkpointed(inputs.checkpointing, n) for n in range(first, end - 1))
        alike = stage, tuple(map(id, units[begin:end])), windows[first : end - 1], kept
        if alike not in peaks:
            bounds = (begin,) * (stage + 1) + (end,) * (stages - stage - 1) + (len(units),)
            rank = plan.grid.rank(Coords(stage, 0, 0, 0))
            timeline = rank_timeline(replace(inputs, bounds=bounds), rank)
            peaks[alike] = timeline.peak
        return peaks[alike]

    return replace(plan, stages=balanced(inputs.shape.num_layers, stages, peak))


def _bounds(draft: Draft, partition: object) -> Bounds | None:
    config, shape, stages = draft.config, draft.shape, draft.grid.pipeline
    layers = shape.num_layers if shape else given_size(draft.model_config, "layers")
    if layers is None:
        draft.problems.say(
            f"{config.model.name} does not state its number of layers: remove {_STAGES}"
        )
        return None
    try:
        if isinstance(partition, list):
            bounds = bounds_of(partition, layers, stages)
        elif shape:
            run = config.model
            bounds = split(shape, stages, config.data.seq_len, run.checkpointing, run.mlp_tiles)
        else:
            bounds = split_evenly(layers, stages)
    except ValueError as error:
        key = _PARTITION if isinstance(partition, list) else _STAGES
        draft.problems.say(f"{key} ({draft.ds.origin(key)}): {error}")
        return None
    return bounds if stages > 1 else None
