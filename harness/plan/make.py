"""Makes the Plan: a Draft of run config, DeepSpeed JSON and world goes once through all passes.

Needs neither torch, transformers nor deepspeed: a plan takes a fraction of a second on a laptop,
and one report lists every mistake in both files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from harness.config.ds_check import apply_changes, check_keys, refusals
from harness.config.ds_json import DsJson
from harness.config.run_config import RunConfig
from harness.errors import ConfigError
from harness.layout.world import World
from harness.plan.adapters import check_adapters
from harness.plan.attention import decide_attention
from harness.plan.balance import balance
from harness.plan.batches import (
    check_evaluation,
    decide_batching,
    mark_padding,
    note_length,
    note_unfinished_ramp,
    ramp,
)
from harness.plan.data import check_data, check_mix, evaluate_splits, keep_split
from harness.plan.draft import Draft
from harness.plan.duration import check_rates
from harness.plan.fine_tuning import (
    default_to_divisible_batch,
    default_to_fine_tuning,
    default_to_published_rate,
    default_to_their_rate,
    keep_settled,
)
from harness.plan.folder import (
    adopt_monitors,
    check_run_dir,
    check_trackers,
    keep_packing,
    keep_rendering,
)
from harness.plan.layers import (
    check_carried,
    check_kernels,
    check_recompute,
    check_reversible,
    note_kernels,
)
from harness.plan.memory import estimate
from harness.plan.merge_settings import merge_settings
from harness.plan.model import check_experts, find_model, note_whole_vocabulary
from harness.plan.optimizer import check_optimizer, note_learning_rate, note_pinned_memory
from harness.plan.parallelism import (
    check_together,
    divide_experts,
    divide_sequences,
    divide_tensors,
)
from harness.plan.pipeline import by_memory, note_pipeline, split_stages
from harness.plan.plan import Plan
from harness.plan.ranks import check_secondary, divide_batch, divide_ranks, note_nodes
from harness.plan.resolve_auto import decide_precision, fill_in_swap_folder, resolve_auto

Pass = Callable[[Draft], None]


def check_json_keys(draft: Draft) -> None:
    """Remove invalid keys of the JSON and report them."""
    check_keys(draft.ds, draft.problems)


def apply_rules(draft: Draft) -> None:
    """Change or reject settings that DeepSpeed gets wrong."""
    accelerator = draft.world.accelerator
    apply_changes(draft.ds, accelerator)
    for rule in refusals(draft.ds, accelerator):
        draft.problems.add(rule["key"], rule["why"])


def check_profile(draft: Draft) -> None:
    """Reject a profile of steps that the run does not reach."""
    draft.problems.say(*draft.config.profile.problems(draft.steps))


JSON_PASSES: tuple[Pass, ...] = (
    check_json_keys,
    decide_precision,
    fill_in_swap_folder,
    check_secondary,
    apply_rules,
)
"""Passes that need only the JSON and the world."""
PASSES: tuple[Pass, ...] = (
    *JSON_PASSES,
    divide_ranks,
    keep_split,
    evaluate_splits,
    balance,
    merge_settings,
    keep_packing,
    keep_rendering,
    keep_settled,
    default_to_fine_tuning,
    decide_batching,
    default_to_divisible_batch,
    ramp,
    divide_batch,
    check_profile,
    check_data,
    check_mix,
    check_optimizer,
    check_run_dir,
    find_model,
    default_to_their_rate,
    default_to_published_rate,
    check_evaluation,
    mark_padding,
    check_carried,
    decide_attention,
    check_experts,
    check_kernels,
    check_recompute,
    check_reversible,
    split_stages,
    check_together,
    divide_tensors,
    divide_sequences,
    divide_experts,
    check_adapters,
    adopt_monitors,
    check_trackers,
    check_rates,
)
LAST_PASSES: tuple[Pass, ...] = (
    note_pipeline,
    note_kernels,
    note_nodes,
    note_unfinished_ramp,
    note_length,
    note_learning_rate,
    note_pinned_memory,
    resolve_auto,
)
"""Passes for a draft without problems."""


def make_plan(
    run: RunConfig,
    ds: DsJson | Mapping[str, Any],
    world: World,
    *,
    estimating: bool = False,
    here: bool = False,
) -> Plan:
    """Check the two configs against each other, the model and the world, and resolve the JSON.

    `estimating`: the plan is made only for its memory estimate; layouts that train.py rejects may
    then be events. `here`: it is for this machine. Raises one ConfigError with every problem.
    """
    draft = Draft(run, ds if isinstance(ds, DsJson) else DsJson(ds), world, estimating, here)
    for make in PASSES:
        make(draft)
    draft.problems.raise_any()
    for make in LAST_PASSES:
        make(draft)
    plan = by_memory(_frozen(draft, run))
    return note_whole_vocabulary(replace(plan, estimate=estimate(plan)))


def problems_of(run: RunConfig, ds: DsJson, world: World) -> list[str]:
    """Return the problems for which make_plan would reject a run, on any machine."""
    draft = Draft(run, ds, world)
    for make in PASSES:
        make(draft)
    return [*draft.problems]


def refuse(ds: DsJson, world: World, problems: Iterable[str], estimating: bool = False) -> NoReturn:
    """Raise ConfigError with the `problems` of unreadable files and those of the JSON."""
    draft = Draft(RunConfig(), ds, world, estimating)
    for make in JSON_PASSES:
        make(draft)
    raise ConfigError([*problems, *draft.problems])


def _frozen(draft: Draft, asked: RunConfig) -> Plan:
    assert draft.batch is not None, "a batch that does not divide is a problem"
    return Plan(
        config=draft.config,
        deepspeed=draft.ds.resolved(),
        deepspeed_given=draft.ds.given,
        deepspeed_set=draft.ds.assigned,
        deepspeed_source=draft.ds.name,
        world=draft.world,
        grid=draft.grid,
        model_config=draft.model_config,
        model_source=draft.model_source,
        shape=draft.shape,
        precision=draft.precision,
        zero_stage=draft.ds.value("zero_optimization.stage"),
        global_batch=draft.batch.global_batch,
        micro_batch=draft.batch.micro_batch,
        grad_accum=draft.batch.grad_accum,
        stages=draft.stages,
        attention_why=draft.attention_why,
        site=draft.site,
        stored=draft.stored,
        events=(*draft.ds.events, *draft.events),
        asked=asked,
    )
