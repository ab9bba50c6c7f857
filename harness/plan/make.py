"""Makes the Plan: a Draft of run config, DeepSpeed JSON and world goes once through all passes.

Needs neither torch, transformers nor deepspeed: a plan takes a fraction of a second on a laptop,
and one report lists every mistake in both files.
"""

import copy
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from harness.config.assignments import COMMAND_LINE, assign, parse_assignment, value_as_text
from harness.config.ds_check import apply_changes, check_keys, refusals
from harness.config.ds_json import PREFIX, DsJson
from harness.config.own import loaded
from harness.config.run_config import RunConfig
from harness.config.run_file import with_values
from harness.errors import ConfigError, Problems
from harness.estimate.fit import Ways
from harness.estimate.hardware import known_gpu
from harness.files.paths import script
from harness.layout.world import World
from harness.plan import (
    attention,
    batches,
    data,
    duration,
    fine_tuning,
    folder,
    layers,
    machine,
    merge_settings,
    model,
    optimizer,
    own_code,
    parallelism,
    preferences,
    resolve_auto,
    settled,
    speed,
)
from harness.plan.plan import Draft, Facts, Plan

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
    resolve_auto.decide_precision,
    resolve_auto.fill_in_swap_folder,
    parallelism.check_secondary,
    machine.check_gpu,
    machine.check_shared_gpus,
    apply_rules,
)
"""Passes that need only the JSON and the world. `check_` passes reject settings and `note_` passes
add events; the others change the run config or, if config/ds_json.py names their file, the JSON.
"""
FIRST_PASSES: tuple[Pass, ...] = (
    *JSON_PASSES,
    parallelism.divide_ranks,
    data.evaluate_splits,
    data.balance,
    merge_settings.merge_settings,
    settled.read_settled,
    settled.date_chats,
    fine_tuning.take_export,
    data.check_data,
    data.check_mix,
    folder.check_run_dir,
)
"""Passes that also read data, run folder and clock. Facts change none of their results."""
PASSES: tuple[Pass, ...] = (
    preferences.decide_preferences,
    speed.choose_or_leave_out,
    fine_tuning.default_to_fine_tuning,
    batches.decide_batching,
    batches.follow_data,
    fine_tuning.default_to_divisible_batch,
    batches.ramp,
    speed.take_micro_batch,
    parallelism.divide_batch,
    check_profile,
    optimizer.check_optimizer,
    model.find_model,
    model.check_initial_weights,
    fine_tuning.default_to_their_rate,
    batches.check_evaluation,
    batches.mark_padding,
    layers.check_carried,
    attention.decide_attention,
    model.check_experts,
    layers.check_kernels,
    layers.check_recompute,
    layers.check_reversible,
    layers.check_skipped,
    parallelism.split_stages,
    parallelism.check_together,
    parallelism.divide_tensors,
    parallelism.divide_sequences,
    parallelism.divide_experts,
    own_code.check_values,
    own_code.check_loss,
    own_code.check_schedule,
    layers.check_adapters,
    layers.check_float8,
    folder.adopt_monitors,
    folder.check_trackers,
    duration.check_rates,
)
LAST_PASSES: tuple[Pass, ...] = (
    fine_tuning.default_to_published_rate,
    parallelism.note_pipeline,
    layers.note_kernels,
    parallelism.note_nodes,
    batches.note_unfinished_ramp,
    batches.note_length,
    optimizer.note_learning_rate,
    optimizer.note_pinned_memory,
    resolve_auto.resolve_auto,
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
    _pass_through(FIRST_PASSES, draft)
    return _completed(draft, run, Facts())


def with_facts(plan: Plan, facts: Facts) -> Plan:
    """Return the plan with what the data and the device tell, made again if that changes it. Raises
    ConfigError.
    """
    assert plan.draft is not None, "made by make_plan"
    rows = plan.model_config.get("vocab_size") or 0
    grows = plan.config.model.init_from is not None and facts.ids > rows
    if grows or facts.attention or facts.has_documents or batches.open_keys(plan.config):
        return _completed(plan.draft, plan.asked, facts)
    return replace(plan, facts=facts)


def _completed(first: Draft, asked: RunConfig, facts: Facts) -> Plan:
    """Return the plan of a draft after its first passes, which is not changed."""
    plan = _with_chosen(first, asked, facts, {}, "")
    chosen, why = speed.choices(plan, takes(plan))
    return _with_chosen(first, asked, facts, chosen, why) if why else plan


def _with_chosen(
    first: Draft, asked: RunConfig, facts: Facts, chosen: dict[str, Any], why: str
) -> Plan:
    draft = copy.deepcopy(first)
    draft.facts, draft.chosen = facts, chosen
    if why:
        draft.note("chosen", why)
    if problems := [*_pass_through(PASSES, draft)]:
        raise ConfigError(problems)
    _pass_through(LAST_PASSES, draft)
    assert draft.batch is not None, "a batch that does not divide is a problem"
    plan = Plan(
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
        divides_residuals=draft.divides_residuals,
        attention_why=draft.attention_why,
        site=draft.site,
        stored=draft.stored,
        events=(*draft.ds.events, *draft.events),
        code=loaded(draft.config.run.code),
        asked=asked,
        facts=facts,
        draft=first,
    )
    return model.estimated(parallelism.by_memory(plan))


def refuse(ds: DsJson, world: World, problems: Iterable[str]) -> NoReturn:
    """Raise ConfigError with the `problems` of unreadable files and those of the JSON."""
    raise ConfigError([*problems, *_pass_through(JSON_PASSES, Draft(RunConfig(), ds, world))])


def _pass_through(passes: tuple[Pass, ...], draft: Draft) -> Problems:
    for make in passes:
        try:
            make(draft)
        except PermissionError as error:  # of a path that the user named
            problem = f"cannot read {error.filename}: {error.strerror}"
            raise ConfigError([*draft.problems, problem]) from None
    return draft.problems


def takes(plan: Plan) -> Ways:
    """Return the changes that a run accepts: KEY=VALUE, or several, separated by spaces.

    The estimate knows what a change saves; the passes of a plan know what can be combined. Any
    other change, such as the number of GPUs, is possible.
    """
    before: set[str] | None = None

    def accept(change: str) -> bool:
        nonlocal before
        if "=" not in change:
            return True
        if before is None:  # problems of the unchanged run, made just for its estimate
            before = {*_refusals(plan)}
        return before.issuperset(_refusals(plan, change))

    return Ways(accept, _planner(plan))


_ASKED = ("name", "checkpointing", "activation_offload", "mlp_tiles", "lora", "init_from")


def _planner(plan: Plan) -> str:
    """Return the planner's command for a job; "" for CPUs and GPUs that are not known."""
    world, model = plan.world, plan.config.model
    gpu = known_gpu(world.gpu)
    if gpu is None or world.ranks_per_gpu > 1:
        return ""
    asked = {
        "--model": model.name,
        "--gpus": world.world_size,
        "--gpus-per-node": world.local_world_size,
        "--gpu": gpu.typed or gpu.key,
        "--seq-len": plan.seq_len,
        "--global-batch": plan.global_batch,
        "--init-from": model.init_from,
        "--lora": model.lora.rank,
        "--quantize": model.lora.quantize,
    }
    flags = [f"{flag} {shlex.quote(str(value))}" for flag, value in asked.items() if value]
    own = (f"model.{name}" for name in type(model).model_fields if name not in _ASKED)
    more = ("optim.name", "train.loss", "run.code", *(f"own.{key}" for key in plan.asked.own.given))
    settings = {key: plan.asked.get(key) for key in (*own, *more) if plan.asked.is_set(key)}
    words = [shlex.quote(f"{key}={value_as_text(value)}") for key, value in settings.items()]
    return " ".join(["python", script("tools/plan_cluster.py"), *flags, *words])


def _refusals(plan: Plan, change: str = "") -> Iterator[str]:
    """Yield the problems of a run after changes, on any machine."""
    run, tree, assigned = plan.asked, copy.deepcopy(plan.deepspeed_given), dict[str, Any]()
    try:
        for text in change.split():
            key, value = parse_assignment(text.removeprefix(PREFIX))
            if text.startswith(PREFIX):
                assign(tree, key, value)
                assigned[key] = value
            else:
                run = with_values(run, {key: value}, {key: COMMAND_LINE})
        ds = DsJson(tree, plan.deepspeed_source, assigned)
        draft = Draft(run, ds, plan.world, facts=plan.facts)
        yield from _pass_through((*FIRST_PASSES, *PASSES), draft)
    except (ConfigError, ValueError) as error:
        yield str(error)
