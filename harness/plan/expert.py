"""Expert parallelism in a plan: the experts can be divided, and nothing contradicts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.config.assignments import flat
from harness.config.ds_json import DsJson
from harness.config.ds_keys import offloaded_to
from harness.layout.expert import ExpertPlan
from harness.plan.draft import Draft
from harness.plan.plan import NOT_TRAINED
from harness.plan.ranks import left_of
from harness.plan.tensor import WHOLE_MATRICES

_SECTION = "expert_parallel"
_ENABLED, _SIZE = f"{_SECTION}.enabled", f"{_SECTION}.autoep_size"
_ZERO = "zero_optimization"
_AS_DEFAULT = [
    *("reduce_scatter", "contiguous_gradients", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_gradients"),
]


def divide_experts(draft: Draft) -> None:
    """Require that neighbouring data ranks can share the experts, and take the section out of the
    JSON: DeepSpeed would put layers of its own in the place of the model's.
    """
    ds, places = draft.ds, asked_experts(draft.ds)
    if places > 1:
        problems = [*_other_keys(ds), *((_SIZE, why) for why in _problems(draft, places))]
        sizes = [(_SIZE, why) for why in _of_sizes(draft, places)]
        for key, why in [*sizes, *problems]:
            if draft.estimating:
                draft.note(NOT_TRAINED, draft.problems.worded(key, why))
            else:
                draft.problems.add(key, why)
        if not sizes and draft.grid.world_size == draft.world.world_size:
            draft.grid = replace(draft.grid, expert=places)
    ds.drop(_SECTION)


def asked_experts(ds: DsJson) -> int:
    """Return the number of ranks that are to share the experts; 1 if none are."""
    return max(1, ds.value(_SIZE)) if ds.value(_ENABLED) else 1


def _other_keys(ds: DsJson) -> Iterator[tuple[str, str]]:
    """Keys of the layers that DeepSpeed would build, where they differ from their defaults."""
    defaults = DsJson({})
    for key, _ in flat(ds.tree[_SECTION], f"{_SECTION}."):
        if key not in (_ENABLED, _SIZE) and ds.value(key) != defaults.value(key):
            yield key, "only DeepSpeed's own expert layers have it, the model's do not: remove it"
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


def _problems(draft: Draft, places: int) -> Iterator[str]:
    run, ds, defaults = draft.config, draft.ds, DsJson({})
    if ds.value(f"{_ZERO}.stage") == 0:
        yield (
            f"{_ZERO}.stage=0 would clip by a mean of norms, each of one rank's experts: use "
            "stage 1, 2 or 3"
        )
    for key in (f"{_ZERO}.{name}" for name in _AS_DEFAULT):
        if ds.value(key) != defaults.value(key):
            yield f"it is not built with {key}: remove that key"
    if "nvme" in {offloaded_to(ds.tree, part) for part in ("optimizer", "param")}:
        yield f"it is not built with states on NVMe: use {_ZERO}.offload_optimizer.device=cpu"
    if run.model.kernels != "none":
        yield f"it is not built with model.kernels={run.model.kernels}: remove one of them"
    if run.model.compile:
        yield "it is not built with model.compile: remove one of them"
    if run.optim.name in ("muon", "adafactor"):
        yield f"optim.name={run.optim.name} {WHOLE_MATRICES}"
