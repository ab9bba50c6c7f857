"""Tensor parallelism in a plan: the model is divisible, and nothing is asked that would not be."""

from __future__ import annotations

from collections.abc import Iterator

from harness.layout.division import tensor_problems
from harness.layout.families import SIZE_KEYS, family_of
from harness.layout.shape import Shape
from harness.layout.tensor import GROUPED, TensorPlan
from harness.plan.attention import ATTENTION_DROPOUTS
from harness.plan.draft import Draft
from harness.plan.plan import NOT_TRAINED
from harness.plan.ranks import left_of

_KEY = "tensor_parallel.autotp_size"
WHOLE_MATRICES = "steps whole matrices: use optim.name=adamw, or ZeRO 3 alone"
_SENT = ("pipeline.pipe_partitioned", "pipeline.grad_partitioned")


def whole_vocabulary(shape: Shape, places: int) -> str:
    """Return that so many ranks cannot divide a vocabulary, and the next size that they can."""
    size = shape.vocab_size
    return (
        f"a vocabulary of {size:,} cannot be divided over {places} "
        f"(model.overrides.vocab_size={padded(size, places)} can)"
    )


def padded(vocab_size: int, places: int) -> int:
    """Return the least vocabulary of at least this size that so many ranks can divide."""
    return -(-vocab_size // places) * places


def divide_tensors(draft: Draft) -> None:
    """Require that the tensor-parallel ranks can divide the model, and take the key out of the
    JSON: DeepSpeed would divide it again.
    """
    places = draft.grid.tensor
    if places > 1:
        for why in _problems(draft, places):
            if draft.estimating:
                draft.note(NOT_TRAINED, draft.problems.worded(_KEY, why))
            else:
                draft.problems.add(_KEY, why)
    draft.ds.drop("tensor_parallel")
    if places > 1 and draft.grid.pipeline > 1:
        _divide_sent(draft, places)


def _divide_sent(draft: Draft, places: int) -> None:
    """Let stages send whole hidden states where DeepSpeed cannot divide them evenly.

    By default each tensor-parallel rank sends its part, which the next stage's put together: a
    token's hidden states, and the router logits that travel with them.
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


def _problems(draft: Draft, places: int) -> Iterator[str]:
    run = draft.config
    if run.model.kernels != "none":
        yield f"it is not built with model.kernels={run.model.kernels}: remove one of them"
    if run.optim.name in ("muon", "adafactor"):
        yield f"optim.name={run.optim.name} {WHOLE_MATRICES}"
    if draft.model_config.get("activation_dropout"):
        why = "would be drawn alike for every rank's part"
        yield f"activation_dropout {why}: set model.residual_dropout=0"
    slices = draft.model_config.get("pretraining_tp")
    if draft.model_config.get("slow_but_exact") and slices not in (None, 1):
        yield (
            f"slow_but_exact with pretraining_tp={slices} reads weights past their modules: set "
            "model.overrides.slow_but_exact=false"
        )
    drawn = [key for key in ATTENTION_DROPOUTS if draft.model_config.get(key)]
    family = family_of(str(draft.model_config.get("model_type")))
    if drawn and GROUPED in family.tensor_plan.values():
        why = "is drawn by its own code, alike for every rank's heads"
        yield f"{drawn[0]} {why}: set model.attention_dropout=0"
    elif drawn and (run.model.compile or run.model.attention not in ("sdpa", "eager")):
        yield (
            f"{drawn[0]} is drawn by each rank for its heads, without model.compile and with "
            "model.attention sdpa or eager: change these, or set model.attention_dropout=0"
        )
    if draft.shape is not None:
        ranks = left_of(draft.world, draft.grid, "pipeline", "sequence")
        problems = tensor_problems(draft.shape, places, ranks)
        yield from problems
        if problems and draft.shape.vocab_size % places:
            yield f"{whole_vocabulary(draft.shape, places)}, and would stay whole on every rank"
    elif draft.model_config:
        try:
            yield from TensorPlan.of(draft.model_config).problems(places)
        except ValueError as error:
            yield str(error)
